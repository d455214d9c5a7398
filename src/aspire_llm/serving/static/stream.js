// The connection to /live/events: reconnects by itself, and is closed while the page is paused or hidden, so that a page
// that nobody looks at costs the server nothing.

import { errorMessage, serverSentEvents } from "./sse.js";

const SILENCE = 15000; // ms; the server says something every 5 s
const LONGEST_WAIT = 4000;

export class LiveStream {
  // onEvent(name, data); onStatus(state, text): live, connecting, reconnecting, stopped
  constructor(headers, onEvent, onStatus) {
    this.headers = headers;
    this.onEvent = onEvent;
    this.onStatus = onStatus;
    this.abort = null;
    this.timer = 0;
  }

  start() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.#run(this.abort);
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async #run(abort) {
    for (let failures = 0; !abort.signal.aborted; failures++) {
      let problem = "connection lost";
      let stopped = false;
      const connection = new AbortController();
      const close = () => connection.abort();
      abort.signal.addEventListener("abort", close, { once: true });
      try {
        const response = await fetch("live/events", { headers: this.headers(), signal: connection.signal, cache: "no-store" });
        if (!response.ok) throw new Error(response.status === 401 ? "API key needed (chat settings)" : await errorMessage(response));
        this.#watch(connection);
        for await (const event of serverSentEvents(response)) {
          if (abort.signal.aborted) return;
          this.#watch(connection);
          if (!event.data) continue;
          failures = 0;
          const data = JSON.parse(event.data);
          if (event.name === "stopped") {
            stopped = true;
            problem = data.reason;
          } else {
            this.onStatus("live", "Live");
            this.onEvent(event.name, data);
          }
        }
      } catch (error) {
        if (!connection.signal.aborted && error.message !== "Failed to fetch") problem = error.message;
      } finally {
        clearTimeout(this.timer);
        abort.signal.removeEventListener("abort", close);
      }
      if (abort.signal.aborted) return;
      if (stopped) this.onStatus("stopped", `Engine stopped: ${problem}`);
      else this.onStatus("reconnecting", `Reconnecting: ${problem}`);
      await pause(stopped ? LONGEST_WAIT / 2 : Math.min(LONGEST_WAIT, 500 * 2 ** failures), abort.signal);
    }
  }

  #watch(connection) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => connection.abort(), SILENCE);
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
