// Server-sent events of a fetch response. EventSource cannot send an API key, nor read the answer to a POST.

export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) yield parseEvent(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// A comment (a heartbeat) has no data.
function parseEvent(block) {
  const event = { name: "message", data: "" };
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) event.name = line.slice(6).trim();
    else if (line.startsWith("data:")) event.data += line.slice(5).trim();
  }
  return event;
}

export async function errorMessage(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.detail ?? response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
