// Browsers do not start workers on pages opened from disk (file:), so there the search worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame.contentWindow;
      this.frame.document.open();
      this.frame.document.write(`<body><script src="${url}"></script></body>`);
      this.frame.document.close();
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((done) => (this.frame.onload = done));
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new this.frame.MessageEvent("message", { data })));
    }
  };
}
