// The server's HTTP interface, as far as this page speaks it.

/** An answer that is none: what the server says instead, or that nothing came. */
export class Refused extends Error {
  constructor(status, message, seconds = 1) {
    super(message);
    this.status = status; // HTTP's; 0: there was no answer
    this.seconds = seconds; // after which to ask again, where status is 429
  }
}

export class Client {
  key = "";

  /** The one model that the server has. */
  async model() {
    const { data } = await (await this.#fetch("/v1/models", {})).json();
    return data[0];
  }

  /** The answer in one piece. */
  async whole(path, body, signal) {
    const response = await this.#post(path, body, signal);
    return response.json().catch(lost);
  }

  /** The chunks of a streamed answer; whoever leaves the loop cancels the rest. */
  async *stream(path, body, signal) {
    const response = await this.#post(path, { ...body, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      let [rest, isWhole] = ["", false];
      for (;;) {
        const { done, value } = await reader.read().catch(lost);
        if (done && isWhole) return;
        if (done) throw new Refused(0, "The connection ended before the answer did.");
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const data = event.slice("data: ".length);
          if ((isWhole = data === "[DONE]")) continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Refused(response.status, chunk.error.message);
          yield chunk;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  #post(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    return this.#fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async #fetch(path, options) {
    const headers = { ...options.headers, ...(this.key && { Authorization: `Bearer ${this.key}` }) };
    const response = await fetch(path, { ...options, headers }).catch(lost);
    if (response.ok) return response;
    const told = await response.json().catch(() => null);
    const message = told?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
    throw new Refused(response.status, message, Number(response.headers.get("Retry-After")) || 1);
  }
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new Refused(0, "The server cannot be reached.");
}

/** Resolves after so many milliseconds, or rejects at the signal. */
export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const leave = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", leave);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", leave, { once: true });
  });
}
