// Search for pages that are read from files. A browser starts no worker from a file, so the worker's script runs in a frame.
if (location.protocol === "file:") {
  globalThis.Worker = class {
    constructor(script) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => this.onmessage?.({ data: structuredClone(data) });
      this.loaded = new Promise((resolve) => {
        const element = this.inside.document.createElement("script");
        element.src = new URL(script, location.href);
        element.onload = resolve;
        this.inside.document.body.append(element);
      });
    }

    postMessage(message) {
      const data = structuredClone(message);
      this.loaded.then(() => this.inside.onmessage?.({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
