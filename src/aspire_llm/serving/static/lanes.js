// The lanes: one row a request, drawn on a canvas each; hover, and the keyboard, tell what a step did.

import { COLOURS, appendCells, describe, draw, meanAccepted } from "./cells.js";

const WIDTHS = [2, 3, 4, 6, 8, 12, 16]; // CSS pixels a step
const KEPT_ENDED = 4;

export class Lanes {
  constructor(root, empty, tip, detail) {
    Object.assign(this, { root, empty, tip, detail });
    this.lanes = new Map(); // request key -> {key, id, cells, row, …}
    this.newest = 0;
    this.history = 400;
    this.zoomLevel = root.parentElement.clientWidth < 700 ? 1 : 2;
    this.chosen = null; // {key, step}
    this.#readColours();
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.#readColours(); this.draw(); });
    new ResizeObserver(() => this.draw()).observe(root);
    root.addEventListener("pointermove", (event) => this.#hover(event));
    root.addEventListener("pointerleave", () => this.#choose(null));
    root.addEventListener("blur", () => this.#choose(null));
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  zoom(by) {
    this.zoomLevel = Math.max(0, Math.min(WIDTHS.length - 1, this.zoomLevel + by));
    this.draw();
  }

  update(frame, whole) {
    this.newest = frame.steps - 1;
    if (whole) {
      this.history = frame.history;
      const present = new Set(frame.lanes.map((lane) => lane.key));
      const kept = [...this.lanes.values()].filter((lane) => lane.cells.length && lane.cells.at(-1).step > this.newest);
      for (const lane of kept) this.#drop(lane); // of an engine that was restarted
      for (const lane of this.lanes.values()) if (!present.has(lane.key) && !lane.endedAt) this.#end(lane, "gone");
    }
    for (const sent of frame.lanes) {
      const lane = this.lanes.get(sent.key) ?? this.#add(sent.key);
      if (whole) lane.cells = [];
      appendCells(lane.cells, sent.cells, this.history);
      Object.assign(lane, { id: sent.id, prompt: sent.prompt, output: sent.output, waiting: sent.waiting });
      if (sent.ended && !lane.endedAt) this.#end(lane, sent.ended);
      if (!sent.ended && lane.endedAt) this.#revive(lane); // a restarted engine counts its requests from 0 again
      this.#label(lane);
    }
    this.#clear();
    this.root.hidden = !this.lanes.size;
    this.empty.hidden = frame.running + frame.waiting > 0;
    this.draw();
  }

  draw() {
    const width = WIDTHS[this.zoomLevel];
    for (const lane of this.lanes.values()) {
      const step = this.chosen?.key === lane.key ? this.chosen.step : null;
      draw(lane.canvas, lane.cells, this.newest, width, this.colours, step);
    }
  }

  #readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(name).trim()]));
  }

  #add(key) {
    const row = document.createElement("div");
    row.className = "lane";
    row.innerHTML = '<div class="who"><span class="id"></span><span class="rate"></span><span class="counts"></span></div><canvas role="img"></canvas>';
    const lane = { key, cells: [], row, endedAt: 0, canvas: row.querySelector("canvas") };
    row.dataset.request = key;
    this.lanes.set(key, lane);
    this.root.insertBefore(row, this.root.querySelector(".ended"));
    return lane;
  }

  #label(lane) {
    const mean = meanAccepted(lane.cells);
    const state = lane.endedAt ? `, ended: ${lane.reason}` : lane.waiting ? ", preempted" : "";
    const find = (name) => lane.row.querySelector(name);
    find(".id").textContent = lane.id;
    find(".id").title = lane.id;
    find(".rate").textContent = mean === null ? "" : `${mean.toFixed(1)} a cycle`;
    find(".rate").title = "tokens gained by a verification that had drafts, mean of the recent steps";
    find(".counts").textContent = `${lane.prompt.toLocaleString("en")} + ${lane.output.toLocaleString("en")} tokens${lane.endedAt ? ` · ${lane.reason}` : state}`;
    lane.row.dataset.cells = lane.cells.length;
    lane.canvas.setAttribute("aria-label",
      `Request ${lane.id}: ${lane.cells.length} recent steps, ${lane.output} tokens${state}` +
      (mean === null ? "" : `, accepted length ${mean.toFixed(1)}`));
  }

  #end(lane, reason) {
    Object.assign(lane, { endedAt: performance.now(), reason });
    lane.row.classList.add("ended");
    const firstEnded = this.root.querySelector(".ended");
    this.root.insertBefore(lane.row, firstEnded === lane.row ? null : firstEnded); // newest first, below those that run
    this.#label(lane);
  }

  #revive(lane) {
    lane.endedAt = 0;
    lane.row.classList.remove("ended");
    this.root.prepend(lane.row);
  }

  // The last few that ended stay until they have moved out of sight.
  #clear() {
    const oldest = this.newest - Math.floor((this.root.clientWidth || 400) / WIDTHS[this.zoomLevel]);
    const ended = [...this.lanes.values()].filter((lane) => lane.endedAt).sort((a, b) => b.endedAt - a.endedAt);
    ended.forEach((lane, i) => {
      if (i >= KEPT_ENDED || !lane.cells.length || lane.cells.at(-1).step < oldest) this.#drop(lane);
    });
  }

  // As they stand on the page.
  #inOrder() {
    return [...this.root.children].map((row) => this.lanes.get(Number(row.dataset.request)));
  }

  #drop(lane) {
    this.lanes.delete(lane.key);
    lane.row.remove();
    if (this.chosen?.key === lane.key) this.#choose(null);
  }

  #hover(event) {
    const canvas = event.target.closest?.("canvas");
    const lane = canvas && this.lanes.get(Number(canvas.parentElement.dataset.request));
    if (!lane) return this.#choose(null);
    const box = canvas.getBoundingClientRect();
    const step = this.newest - Math.floor((box.right - event.clientX) / WIDTHS[this.zoomLevel]);
    const cell = lane.cells.find((c) => c.step === step);
    this.#choose(cell ? { key: lane.key, step } : null);
  }

  #key(event) {
    const lanes = this.#inOrder();
    if (!lanes.length) return;
    const row = lanes.findIndex((lane) => lane.key === this.chosen?.key);
    const lane = lanes[Math.max(0, row)];
    const at = row < 0 ? -1 : lane.cells.findIndex((cell) => cell.step === this.chosen.step);
    const visible = Math.floor(lane.canvas.clientWidth / WIDTHS[this.zoomLevel]);
    const first = lane.cells.findIndex((cell) => cell.step > this.newest - visible);
    const last = lane.cells.length - 1;
    const go = (to, index) => {
      const cell = to.cells[index];
      if (cell) this.#choose({ key: to.key, step: cell.step }, true);
    };
    const across = (to) => go(to, nearest(to.cells, this.chosen?.step ?? this.newest));
    const moves = {
      ArrowLeft: () => go(lane, at < 0 ? last : Math.max(first, at - 1)),
      ArrowRight: () => go(lane, at < 0 ? last : Math.min(last, at + 1)),
      ArrowUp: () => across(lanes[Math.max(0, row - 1)]),
      ArrowDown: () => across(lanes[Math.min(lanes.length - 1, row + 1)]),
      Home: () => go(lane, first),
      End: () => go(lane, last),
      Escape: () => this.#choose(null),
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    moves[event.key]();
  }

  #choose(chosen, byKey = false) {
    const changed = chosen?.key !== this.chosen?.key || chosen?.step !== this.chosen?.step;
    this.chosen = chosen;
    if (changed) this.draw();
    const lane = chosen && this.lanes.get(chosen.key);
    const cell = lane && lane.cells.find((c) => c.step === chosen.step);
    this.tip.hidden = !cell;
    for (const other of this.lanes.values()) other.row.classList.toggle("chosen", byKey && other === lane);
    if (!cell) return;
    this.tip.textContent = describe(cell);
    if (byKey) {
      this.detail.textContent = `Request ${lane.id}, ${describe(cell)}`;
      lane.row.scrollIntoView({ block: "nearest" });
    }
    const box = lane.canvas.getBoundingClientRect();
    const x = box.right - (this.newest - cell.step + 0.5) * WIDTHS[this.zoomLevel];
    const half = this.tip.offsetWidth / 2, room = document.documentElement.clientWidth;
    this.tip.style.left = `${Math.max(6, Math.min(room - 2 * half - 6, x - half))}px`;
    const above = box.top - this.tip.offsetHeight - 6;
    this.tip.style.top = `${above > 60 ? above : box.bottom + 6}px`;
  }
}

function nearest(cells, step) {
  let best = cells.length - 1;
  cells.forEach((cell, i) => { if (Math.abs(cell.step - step) < Math.abs(cells[best].step - step)) best = i; });
  return best;
}
