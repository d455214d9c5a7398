// What a request did, step by step: cells, what became of its drafts, and their drawing.

export const PREFILL = 0, DRAFT = 1, VERIFY = 2;
export const COLOURS = ["--prefill", "--draft", "--accepted", "--rejected", "--verify", "--track", "--focus", "--panel"];

// cells: [{step, kind, tokens, value, verdict}]; raw: [step, kind, tokens, value] as the server sends them.
// A verification settles the drafts before it: the first `value` of them were accepted, the others rejected.
export function appendCells(cells, raw, history) {
  let last = cells.length ? cells[cells.length - 1].step : -1;
  for (const [step, kind, tokens, value] of raw) {
    if (step <= last) continue; // a snapshot had it already
    last = step;
    if (kind === VERIFY) {
      let position = tokens - 1;
      for (let i = cells.length - 1; i >= 0 && position > 0 && cells[i].kind === DRAFT; i--) {
        position -= 1;
        cells[i].verdict = position < value ? "accepted" : "rejected";
        cells[i].position = position + 1;
      }
    }
    cells.push({ step, kind, tokens, value, verdict: null });
  }
  if (cells.length > history) cells.splice(0, cells.length - history);
}

export function describe(cell) {
  const head = `step ${cell.step.toLocaleString("en")}`;
  if (cell.kind === PREFILL) return `${head}: prefill\n${cell.tokens} prompt tokens from position ${cell.value}`;
  if (cell.kind === DRAFT) {
    const fate = cell.verdict ? `${cell.verdict}, position ${cell.position} of its cycle` : "not verified yet";
    return `${head}: draft, ${fate}\nconfidence ${(100 * cell.value).toFixed(0)} %`;
  }
  const drafts = cell.tokens - 1;
  if (!drafts) return `${head}: plain decoding, 1 token`;
  return `${head}: verify\n${cell.value} of ${drafts} drafts accepted, ${cell.value + 1} tokens gained`;
}

// Mean accepted length of the kept verifications that had drafts, or null.
export function meanAccepted(cells) {
  let cycles = 0, accepted = 0;
  for (const cell of cells) {
    if (cell.kind === VERIFY && cell.tokens > 1) {
      cycles += 1;
      accepted += cell.value;
    }
  }
  return cycles ? 1 + accepted / cycles : null;
}

// Draws the steps up to `newest`, which stands at the right edge, `width` CSS pixels each. Heights say what colours say.
export function draw(canvas, cells, newest, width, colours, chosenStep) {
  const scale = window.devicePixelRatio || 1;
  const w = Math.round(canvas.clientWidth * scale), h = Math.round(canvas.clientHeight * scale);
  if (!w || !h) return;
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, w, h);
  context.fillStyle = colours["--track"];
  context.fillRect(0, h - Math.max(1, Math.round(scale)), w, Math.max(1, Math.round(scale)));
  const gap = width >= 3 ? Math.max(1, Math.round(scale)) : 0;
  for (const cell of cells) {
    const right = w - Math.round((newest - cell.step) * width * scale);
    const left = w - Math.round((newest - cell.step + 1) * width * scale);
    if (right <= 0) continue;
    const size = Math.max(1, right - left - gap);
    if (cell.kind === PREFILL) hatch(context, left, 0, right - left, h, colours["--prefill"], scale);
    else if (cell.kind === VERIFY) bar(context, left, size, h, 1, colours["--verify"]);
    else if (cell.verdict === "rejected") rejected(context, left, size, h, colours["--rejected"], scale);
    else bar(context, left, size, h, 0.55, colours[cell.verdict ? "--accepted" : "--draft"]);
    if (cell.kind === VERIFY && cell.tokens > 1 && width >= 11) label(context, cell.value + 1, left, size, scale, colours["--panel"]);
    if (cell.step === chosenStep) {
      context.strokeStyle = colours["--focus"];
      context.lineWidth = 2 * scale;
      context.strokeRect(left - scale, scale, Math.max(size, 3) + 2 * scale, h - 2 * scale);
    }
  }
}

function bar(context, x, size, h, share, colour) {
  context.fillStyle = colour;
  const height = Math.round(h * share);
  context.fillRect(x, h - height, size, height);
}

function rejected(context, x, size, h, colour, scale) {
  bar(context, x, size, h, 0.28, colour);
  if (size < 6 * scale) return;
  const arm = Math.min(size * 0.32, 4 * scale), cx = x + size / 2, cy = h * 0.52;
  context.strokeStyle = colour;
  context.lineWidth = 1.5 * scale;
  context.beginPath();
  context.moveTo(cx - arm, cy - arm);
  context.lineTo(cx + arm, cy + arm);
  context.moveTo(cx + arm, cy - arm);
  context.lineTo(cx - arm, cy + arm);
  context.stroke();
}

function hatch(context, x, y, width, height, colour, scale) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.4 * scale;
  context.beginPath();
  const pitch = 5 * scale; // lines of neighbouring cells meet, as they start from the canvas's own corner
  for (let c = Math.floor((x - height) / pitch) * pitch; c < x + width; c += pitch) {
    context.moveTo(c, y + height);
    context.lineTo(c + height, y);
  }
  context.stroke();
  context.restore();
}

function label(context, number, x, size, scale, colour) {
  context.fillStyle = colour;
  context.font = `600 ${9 * scale}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.fillText(String(number), x + size / 2, 11 * scale);
}
