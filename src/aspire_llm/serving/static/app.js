// The live page: what the engine is doing now. Parts: stream (the connection), lanes, numbers, chat.

import { Chat } from "./chat.js";
import { Lanes } from "./lanes.js";
import { Numbers } from "./numbers.js";
import { LiveStream } from "./stream.js";

const byId = (id) => document.getElementById(id);
const headers = () => (byId("api-key").value ? { Authorization: `Bearer ${byId("api-key").value}` } : {});

const lanes = new Lanes(byId("lanes"), byId("empty"), byId("tip"), byId("lane-detail"));
const numbers = new Numbers();
const chat = new Chat(headers);
const stream = new LiveStream(headers, onEvent, showStatus);
let paused = false;

function onEvent(name, frame) {
  if (name === "snapshot") {
    byId("engine").textContent = `${frame.model}, method ${frame.method}`;
    if (chat.model === null) chat.findModel().then(showExample); // before, it was being loaded
  }
  numbers.update(frame);
  lanes.update(frame, name === "snapshot");
}

function showStatus(state, text) {
  if (byId("status").dataset.state === state && byId("status-text").textContent === text) return;
  byId("status").dataset.state = state;
  byId("status-text").textContent = text;
}

function setPaused(value) {
  paused = value;
  byId("pause").setAttribute("aria-pressed", String(paused));
  byId("pause").textContent = paused ? "Resume" : "Pause";
  if (paused) {
    stream.stop();
    showStatus("paused", "Paused");
  } else connect();
}

function connect() {
  if (paused || document.hidden) return;
  showStatus("connecting", "Connecting…");
  stream.start();
}

function showExample() {
  const body = JSON.stringify({ model: chat.model ?? "default", messages: [{ role: "user", content: "Tell me a story." }], max_tokens: 200 });
  const key = byId("api-key").value ? "  -H 'Authorization: Bearer …' \\\n" : "";
  byId("curl").textContent = `curl ${new URL("v1/chat/completions", document.baseURI)} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${body}'`;
}

async function copyExample() {
  const done = () => { byId("copy").textContent = "Copied"; setTimeout(() => { byId("copy").textContent = "Copy"; }, 1500); };
  try {
    await navigator.clipboard.writeText(byId("curl").textContent);
    done();
  } catch { // no clipboard without https: leave it selected
    getSelection().selectAllChildren(byId("curl"));
  }
}

byId("pause").addEventListener("click", () => setPaused(!paused));
byId("zoom-in").addEventListener("click", () => lanes.zoom(1));
byId("zoom-out").addEventListener("click", () => lanes.zoom(-1));
byId("copy").addEventListener("click", copyExample);
byId("api-key").addEventListener("change", () => {
  stream.stop();
  connect();
});
document.addEventListener("visibilitychange", () => (document.hidden ? stream.stop() : connect()));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, button, summary, a")) return;
  if (event.key === " ") {
    event.preventDefault();
    setPaused(!paused);
  } else if (event.key === "+" || event.key === "=") lanes.zoom(1);
  else if (event.key === "-") lanes.zoom(-1);
});

connect();
showExample();
