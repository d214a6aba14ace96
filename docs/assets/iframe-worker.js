/* Search in pages that are opened as files: browsers start no Worker there, so its script runs in a
   hidden frame. Material's offline plugin would load such a script from another site. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.ready = new Promise((resolve) => {
        this.inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data })
          this.dispatchEvent(event)
          if (this.onmessage) this.onmessage(event)
        }
        // What a worker calls before it goes on; here it waits for the last of the scripts.
        this.inside.importScripts = (...urls) =>
          urls.reduce((before, next) => before.then(() => load(this.inside, next)), Promise.resolve())
        load(this.inside, url).then(resolve)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      inside.document.head.append(script)
    })
}
