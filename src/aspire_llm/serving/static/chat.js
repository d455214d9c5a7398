// A chat over the server's own OpenAI endpoint, streaming.

import { errorMessage, serverSentEvents } from "./sse.js";

const byId = (id) => document.getElementById(id);

export class Chat {
  constructor(headers) {
    this.headers = headers;
    this.messages = [];
    this.running = null; // AbortController of the answer under way
    this.model = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.#send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.#send();
      }
    });
    byId("chat-clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      byId("chat-log").textContent = "";
      byId("chat-input").focus();
    });
  }

  // The name that the server goes by; null where it does not say.
  async findModel() {
    try {
      const response = await fetch("v1/models", { headers: this.headers() });
      if (response.ok) this.model = (await response.json()).data[0].id;
    } catch { /* the stream's status tells that the server is away */ }
    byId("chat-model").textContent = this.model ?? "";
    return this.model;
  }

  async #send() {
    const text = byId("chat-input").value.trim();
    if (!text) return;
    byId("chat-input").value = "";
    this.#bubble("user").firstChild.data = text;
    const messages = [...this.messages, { role: "user", content: text }];
    const bubble = this.#bubble("assistant streaming");
    const abort = (this.running = new AbortController());
    byId("chat-send").textContent = "Stop";
    byId("chat-log").setAttribute("aria-busy", "true");
    const answer = { text: "", started: performance.now(), first: 0, tokens: 0, usage: null, speculation: null, end: null };
    try {
      await this.#stream(messages, answer, bubble, abort.signal);
    } catch (error) {
      if (abort.signal.aborted) answer.end = "stopped";
      else {
        answer.end = null;
        this.#bubble("error").firstChild.data = error.message === "Failed to fetch" ? "The server cannot be reached." : error.message;
      }
    }
    bubble.classList.remove("streaming");
    if (answer.text) {
      this.messages = [...messages, { role: "assistant", content: answer.text }];
      this.#statistics(bubble, answer);
    } else bubble.remove();
    this.running = null;
    byId("chat-send").textContent = "Send";
    byId("chat-log").removeAttribute("aria-busy");
  }

  async #stream(messages, answer, bubble, signal) {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { ...this.headers(), "Content-Type": "application/json" },
      signal,
      body: JSON.stringify({
        model: this.model ?? (await this.findModel()) ?? undefined,
        messages,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number(byId("chat-max").value) || 256,
        temperature: Number(byId("chat-temperature").value),
      }),
    });
    if (!response.ok) throw new Error(await errorMessage(response));
    for await (const event of serverSentEvents(response)) {
      if (!event.data || event.data === "[DONE]") continue;
      const chunk = JSON.parse(event.data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) {
        answer.first ||= performance.now();
        answer.text += choice.delta.content;
        bubble.firstChild.data = answer.text;
        this.#scroll();
      }
      answer.end = choice?.finish_reason ?? answer.end;
      answer.usage = chunk.usage ?? answer.usage;
      answer.speculation = chunk.metrics?.speculative_decoding ?? answer.speculation;
    }
  }

  #statistics(bubble, answer) {
    const seconds = (performance.now() - answer.first) / 1000;
    const tokens = answer.usage?.completion_tokens;
    const parts = [`first text after ${((answer.first - answer.started) / 1000).toFixed(2)} s`];
    if (tokens) parts.unshift(`${tokens} tokens`);
    if (tokens > 1 && seconds > 0.01) parts.push(`${((tokens - 1) / seconds).toFixed(0)} tokens/s`);
    if (answer.speculation?.num_spec_steps) parts.push(`accepted length ${answer.speculation.mean_acceptance_length.toFixed(2)}`);
    if (answer.end && answer.end !== "stop") parts.push(answer.end);
    const line = document.createElement("span");
    line.className = "stats";
    line.textContent = parts.join(" · ");
    bubble.append(line);
    this.#scroll();
  }

  #bubble(kind) {
    const bubble = document.createElement("div");
    bubble.className = `message ${kind}`;
    bubble.append("");
    byId("chat-log").append(bubble);
    this.#scroll();
    return bubble;
  }

  #scroll() {
    byId("chat-log").scrollTop = byId("chat-log").scrollHeight;
  }
}
