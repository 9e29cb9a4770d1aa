// The part of the server's HTTP API that the page uses.

/** A failed request: the server rejected it, or did not respond. */
export class RequestError extends Error {
  constructor(status, message, seconds = 1) {
    super(message);
    this.status = status; // the HTTP status; 0: no response
    this.seconds = seconds; // time to wait before a retry, if status is 429
  }
}

export class Client {
  key = "";

  /** The server's model. */
  async model() {
    const { data } = await (await this.#fetch("/v1/models", {})).json();
    return data[0];
  }

  /** A whole response. */
  async complete(path, body, signal) {
    const response = await this.#post(path, body, signal);
    return response.json().catch(connectionLost);
  }

  /** The chunks of a streamed response. Leaving the loop cancels the rest. */
  async *stream(path, body, signal) {
    const response = await this.#post(path, { ...body, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    try {
      let [rest, isDone] = ["", false];
      for (;;) {
        const { done, value } = await reader.read().catch(connectionLost);
        if (done && isDone) return;
        if (done) throw new RequestError(0, "The connection ended before the answer was complete.");
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const data = event.slice("data: ".length);
          if ((isDone = data === "[DONE]")) continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new RequestError(response.status, chunk.error.message);
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
    const response = await fetch(path, { ...options, headers }).catch(connectionLost);
    if (response.ok) return response;
    const content = await response.json().catch(() => null);
    const message = content?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`;
    throw new RequestError(response.status, message, Number(response.headers.get("Retry-After")) || 1);
  }
}

function connectionLost(error) {
  if (error.name === "AbortError") throw error;
  throw new RequestError(0, "The server cannot be reached.");
}

/** Resolves after some milliseconds, and rejects when the signal aborts. */
export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const abort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", abort);
      resolve();
    }, milliseconds);
    signal.addEventListener("abort", abort, { once: true });
  });
}
