// Search from disk: browsers refuse to start a worker from a file:// address, so the worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<body><script>
        const parentWindow = parent;
        postMessage = (data) => parentWindow.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((last, url) => last.then(() => new Promise((done, failed) => {
          const script = document.createElement("script");
          Object.assign(script, { src: url, onload: done, onerror: failed });
          document.body.append(script);
        })), Promise.resolve());
      <\/script><script src="${url}"><\/script></body>`;
      this.ready = new Promise((done) => frame.addEventListener("load", done));
      window.addEventListener("message", (event) => {
        if (event.source === frame.contentWindow) this.receive(event.data);
      });
      (document.body || document.documentElement).append(frame);
      this.frame = frame;
    }
    receive(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
