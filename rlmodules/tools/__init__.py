"""What `python -m rlmodules` computes and prints."""
