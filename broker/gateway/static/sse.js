// Server-sent events from a fetch response: the browser's own EventSource cannot send an API key.

/** Takes text in pieces of any size, gives the events that are complete. Lines end with \n, as this gateway sends them. */
export class EventParser {
  #rest = "";

  push(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map(readBlock).filter((event) => event.data !== "");
  }
}

function readBlock(block) {
  const event = { id: "", name: "message", data: "" };
  const data = [];
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at === 0) continue; // a comment, such as the keep-alive
    const field = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (field === "data") data.push(value);
    else if (field === "id") event.id = value;
    else if (field === "event") event.name = value;
  }
  event.data = data.join("\n");
  return event;
}

/** The events of a response's body, in order, until it ends; throws when the connection breaks. */
export async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
