// The search of a site that is read from the file system: browsers start no workers from files, so
// their scripts run in an invisible frame. The name tells the offline plugin that this is here;
// otherwise it takes such a script from an outside host.
"use strict";

// What a worker's script expects around it.
const workerScope = `
  window.postMessage = (data) => parent.postMessage(data, "*");
  window.importScripts = async (...urls) => {
    for (const url of urls)
      await new Promise((done, failed) => {
        const script = document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        document.body.append(script);
      });
  };`;

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    const { href } = new URL(url, document.baseURI);
    this.frame.srcdoc =
      `<!doctype html><body><script>${workerScope}</script><script src="${href}"></script>`;
    this.ready = new Promise((done) => this.frame.addEventListener("load", done));
    this.receive = ({ source, data }) => {
      if (source !== this.frame.contentWindow) return;
      const message = new MessageEvent("message", { data });
      this.dispatchEvent(message);
      this.onmessage?.(message);
    };
    addEventListener("message", this.receive);
    document.body.append(this.frame);
  }

  // The frame's own `postMessage` leads out of it, so the message is dispatched inside.
  async postMessage(data) {
    await this.ready;
    const { contentWindow } = this.frame;
    contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data }));
  }

  terminate() {
    removeEventListener("message", this.receive);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
