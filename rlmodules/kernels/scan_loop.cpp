// The recurrence of scan.py on a CPU, one pass over memory: h_t = a_t h_{t-1} + b_t.
//
// Arrays are (rows, steps, width) with steps of `stride` numbers between rows and between steps; the
// last axis is dense. A width counts reals, two for a complex number.

#include <cstdint>

struct Strides {
    int64_t row, step;
};

template <class Real>
static void real_step(Real *out, const Real *a, const Real *b, const Real *h, int64_t width) {
#pragma GCC ivdep
    for (int64_t d = 0; d < width; ++d) out[d] = a[d] * h[d] + b[d];
}

template <class Real>
static void complex_step(
    Real *out, const Real *a, const Real *b, const Real *h, int64_t width, Real sign
) {
#pragma GCC ivdep
    for (int64_t d = 0; d < width; d += 2) {
        const Real real = a[d], imaginary = sign * a[d + 1];
        out[d] = real * h[d] - imaginary * h[d + 1] + b[d];
        out[d + 1] = real * h[d + 1] + imaginary * h[d] + b[d + 1];
    }
}

template <class Real>
static void recur(
    Real *out, const Real *a, const Real *b, const Real *h, const int64_t *sizes,
    const Strides *strides, bool is_complex, bool conjugate, bool reverse
) {
    const int64_t rows = sizes[0], steps = sizes[1], width = sizes[2];
    for (int64_t row = 0; row < rows; ++row) {
        const Real *previous = h + row * width;
        for (int64_t i = 0; i < steps; ++i) {
            const int64_t t = reverse ? steps - 1 - i : i;
            const auto offset = [&](int k) { return row * strides[k].row + t * strides[k].step; };
            Real *now = out + offset(0);
            const Real *a_t = a + offset(1), *b_t = b + offset(2);
            if (is_complex)
                complex_step<Real>(now, a_t, b_t, previous, width, conjugate ? -1 : 1);
            else
                real_step(now, a_t, b_t, previous, width);
            previous = now;
        }
    }
}

#define EXPORT(NAME, REAL)                                                                      \
    extern "C" void NAME(                                                                       \
        REAL *out, const REAL *a, const REAL *b, const REAL *h, const int64_t *sizes,           \
        const Strides *strides, bool is_complex, bool conjugate, bool reverse                   \
    ) {                                                                                         \
        recur(out, a, b, h, sizes, strides, is_complex, conjugate, reverse);                    \
    }

EXPORT(recur_float, float)
EXPORT(recur_double, double)
