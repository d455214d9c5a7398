// The tiles and the two bar charts.

const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const SPARK = 300; // frames, a minute

export class Numbers {
  constructor() {
    this.rates = [];
  }

  update(frame) {
    const set = (id, text) => { byId(id).textContent = text; };
    set("tokens-per-s", frame.tokens_per_s < 10 ? frame.tokens_per_s.toFixed(1) : count(frame.tokens_per_s));
    set("prompt-per-s", `${count(frame.prompt_tokens_per_s)} prompt tokens/s`);
    this.#speedUp(frame);
    set("accepted", frame.mean_accepted === null ? "–" : frame.mean_accepted.toFixed(2));
    const drafted = total(frame.drafted_at), accepted = total(frame.accepted_at);
    set("accepted-note", drafted ? `${((100 * accepted) / drafted).toFixed(0)} % of drafts accepted` : "no drafts so far");
    set("step-time", milliseconds(frame.step_seconds));
    set("step-note", frame.step_seconds_predicted === null ? `${count(frame.steps)} steps` : `${milliseconds(frame.step_seconds_predicted)} predicted`);
    const share = (100 * frame.kv.tokens) / frame.kv.room;
    set("kv", share && share < 10 ? share.toFixed(1) : share.toFixed(0));
    set("kv-note", `${count(frame.kv.tokens)} of ${count(frame.kv.room)} tokens`);
    byId("kv-bar").style.width = `${share}%`;
    byId("kv-bar").classList.toggle("full", share > 95);
    set("running", frame.running);
    set("queue-note", `${frame.waiting} waiting, at most ${frame.max_running} run` + (frame.preemptions ? `, ${frame.preemptions} preempted` : ""));
    this.#spark(frame.tokens_per_s);
    this.#charts(frame);
  }

  #speedUp(frame) {
    const value = byId("speed-up"), note = byId("speed-up-note");
    if (!frame.has_cost_model) {
      value.textContent = "n/a";
      note.textContent = "no cost model";
    } else {
      value.textContent = frame.speed_up === null ? "–" : `${frame.speed_up.toFixed(2)}×`;
      note.textContent = "over plain decoding";
    }
  }

  #spark(rate) {
    this.rates.push(rate);
    if (this.rates.length > SPARK) this.rates.shift();
    const top = Math.max(...this.rates, 1), n = this.rates.length;
    const points = this.rates.map((r, i) => `${(150 - ((n - 1 - i) * 150) / SPARK).toFixed(1)} ${(29 - (26 * r) / top).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    byId("spark").querySelector(".line").setAttribute("d", line);
    byId("spark").querySelector(".area").setAttribute("d", `${line}L150 30L${(150 - ((n - 1) * 150) / SPARK).toFixed(1)} 30Z`);
  }

  #charts(frame) {
    const verifications = total(frame.lengths);
    bars(byId("by-position"), frame.drafted_at.map((drafted, i) => ({
      at: i + 1, share: drafted ? frame.accepted_at[i] / drafted : 0, title: `draft ${i + 1}: ${frame.accepted_at[i]} of ${drafted} accepted`,
    })), "No drafts verified yet");
    bars(byId("by-length"), frame.lengths.map((n, i) => ({
      at: i, share: verifications ? n / verifications : 0, title: `${i} drafts: ${n} of ${verifications} verifications`,
    })).filter(() => verifications), "No verifications yet", true);
    byId("position-note").textContent = verifications ? "% of those verified at the position" : "";
    byId("length-note").textContent = verifications ? `% of the last ${verifications} verifications` : "";
  }
}

// One bar each; `relative`: the tallest fills the height, else 100 % does.
function bars(list, values, none, relative = false) {
  list.classList.toggle("dense", values.length > 18);
  if (!values.length) {
    list.innerHTML = '<li class="none"></li>';
    list.firstChild.textContent = none;
    return;
  }
  const top = relative ? Math.max(...values.map((v) => v.share), 0.01) : 1;
  if (list.querySelector(".none")) list.textContent = "";
  while (list.children.length > values.length) list.lastChild.remove();
  while (list.children.length < values.length) {
    const item = document.createElement("li");
    item.innerHTML = '<span class="value"></span><i></i><span class="at"></span>';
    list.append(item);
  }
  values.forEach((v, i) => {
    const [value, bar, at] = list.children[i].children;
    list.children[i].title = v.title;
    value.textContent = (100 * v.share).toFixed(0);
    bar.style.height = `${((v.share / top) * 92).toFixed(1)}px`;
    at.textContent = v.at;
  });
}

const total = (numbers) => numbers.reduce((a, b) => a + b, 0);

function milliseconds(seconds) {
  if (seconds === null) return "–";
  const ms = 1000 * seconds;
  return ms < 10 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : ms.toFixed(0);
}
