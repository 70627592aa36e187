// A page that was opened as a file may not start a worker, so that search would not answer there.
// This runs the worker's script in a hidden frame instead. The theme's worker looks for the name
// IFrameWorker and finds its own address in the only script[src] of its document.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search worker";
      this.frame.srcdoc = "<!doctype html><html lang=en><title>search worker</title>";
      this.frame.addEventListener("load", () => this.start(String(address)), { once: true });
      if (document.body) document.body.append(this.frame);
      else addEventListener("DOMContentLoaded", () => document.body.append(this.frame));
    }

    start(address) {
      const inside = this.frame.contentWindow;
      inside.IFrameWorker = IFrameWorker;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) =>
        addresses.reduce(
          (before, each) => before.then(() => IFrameWorker.load(inside.document, each)),
          Promise.resolve(),
        );
      IFrameWorker.load(inside.document, address).then(() => {
        this.loaded = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    static load(owner, address) {
      return new Promise((done, failed) => {
        const script = owner.createElement("script");
        script.src = address;
        script.onload = () => done();
        script.onerror = () => failed(new Error(`cannot load ${address}`));
        owner.head.append(script);
      });
    }

    postMessage(data) {
      if (this.loaded) {
        const Message = this.frame.contentWindow.MessageEvent;
        this.frame.contentWindow.dispatchEvent(new Message("message", { data }));
      } else {
        this.waiting.push(data);
      }
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.Worker = window.IFrameWorker = IFrameWorker;
}
