// The page: sends requests from its fields, and shows answers.

import { Client, RequestError } from "./client.js";
import { Tally, ask, prove } from "./proof.js";

// Prompts for the model that ships with detjax. XLA's own operations give several answers to the first one.
const PROMPTS = {
  completion: "KING RICHARD III:\nHell is empty, and all the devils are here.\n",
  chat: "Does the order in which a computer adds numbers matter?",
};
const FEWEST_COLUMNS = 16;
const MAX_COLUMNS = 32;
const MAX_SHOWN = 12; // unique answers

const $ = (id) => document.getElementById(id);
const client = new Client();
let model = null;

// --- the model -------------------------------------------------------------------------------------------------------

async function showModel() {
  showError("model-error", null);
  try {
    model = await client.model();
  } catch (error) {
    $("key-form").hidden = error.status !== 401;
    if (error.status === 401 && !client.key) $("key").focus();
    else showError("model-error", error);
    return;
  }
  $("key-form").hidden = true;
  $("model").textContent = model.id;
  $("fingerprint").textContent = model.system_fingerprint;
  document.title = `${model.id} – detjax`;
  if (model.chat === false) {
    $("as-chat").disabled = true;
    $("as-chat").labels[0].title = "The model has no chat template.";
  }
  $("send").disabled = $("prove-button").disabled = false;
}

// --- requests --------------------------------------------------------------------------------------------------------

/** Builds the request from the fields. */
function requestFromFields() {
  const prompt = $("prompt").value;
  const isChat = $("as-chat").checked;
  const body = {
    model: model.id,
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    seed: $("seed").valueAsNumber,
    stream_options: { include_batch: true },
  };
  return isChat
    ? { path: "/v1/chat/completions", body: { ...body, messages: [{ role: "user", content: prompt }], logprobs: true } }
    : { path: "/v1/completions", body: { ...body, prompt, logprobs: 0 } };
}

/** Makes a form's button start work, or stop it while it runs. */
function startAndStop(form, button, label, work) {
  let stop = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stop) return stop.abort();
    if (!$("ask").reportValidity()) return;
    stop = new AbortController();
    button.textContent = "Stop";
    button.classList.add("stops");
    const others = [$("send"), $("prove-button")].filter((other) => other !== button);
    others.forEach((other) => (other.disabled = true));
    try {
      await work(stop.signal);
    } finally {
      stop = null;
      button.textContent = label;
      button.classList.remove("stops");
      others.forEach((other) => (other.disabled = false));
    }
  });
  window.addEventListener("pagehide", () => stop?.abort());
}

function showError(id, error) {
  $(id).textContent = error === null ? "" : sentence(error);
}

function sentence(error) {
  if (!(error instanceof RequestError)) throw error;
  const text = error.message[0].toUpperCase() + error.message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

// --- one answer ------------------------------------------------------------------------------------------------------

async function send(signal) {
  const [box, output] = [$("answer"), $("output")];
  const start = performance.now();
  const seconds = () => `${((performance.now() - start) / 1000).toFixed(1)} s`;
  showError("ask-error", null);
  output.textContent = "";
  $("output-facts").textContent = "";
  output.setAttribute("aria-busy", "true");
  const show = atFrames((answer) => {
    const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
    output.textContent = answer.text;
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    $("output-facts").textContent = `${counted(answer.tokens.length, "token")}, ${seconds()}`;
  });
  let answer = null;
  try {
    await ask(client, requestFromFields(), signal, (one) => show((answer = one)));
    show.now();
    const ending = answer.ending === "length" ? "stopped at max tokens" : "complete";
    $("output-facts").textContent = `${counted(answer.tokens.length, "token")}, ${ending}, ${seconds()}. SHA-256 `;
    $("output-facts").append(code(answer.digest));
  } catch (error) {
    show.now();
    if (!signal.aborted) return showError("ask-error", error);
    $("output-facts").textContent = `Stopped after ${counted(answer?.tokens.length ?? 0, "token")}.`;
  } finally {
    output.setAttribute("aria-busy", "false");
  }
}

// --- many answers ----------------------------------------------------------------------------------------------------

async function proof(signal) {
  const total = $("total").valueAsNumber;
  const tally = new Tally();
  const show = atFrames(() => showTally(tally, total));
  showError("prove-error", null);
  $("unique-answers").replaceChildren();
  showTally(tally, total);
  const onProgress = (isWaiting) => {
    showVerdict(isWaiting ? "The server's queue is full. Waiting." : "Sending requests.");
    show();
  };
  onProgress(false);
  let ending = "";
  try {
    const experiment = { model, request: requestFromFields(), prompt: $("prompt").value, total };
    await prove(client, experiment, tally, signal, onProgress);
  } catch (error) {
    ending = "Stopped. ";
    if (!signal.aborted) showError("prove-error", error);
  }
  show.now();
  showVerdict(ending + verdict(tally));
}

function showVerdict(text) {
  if ($("verdict").textContent !== text) $("verdict").textContent = text;
}

function verdict(tally) {
  const { answers, unique, fingerprints } = tally;
  if (answers === 0) return "No answers to compare.";
  if (answers === 1) return "Only one answer, nothing to compare it with.";
  const company =
    tally.largestBatch === 1
      ? "Each was computed alone, so this proves little."
      : `They were computed in steps of ${range(tally)} samples.`;
  if (unique.size === 1) {
    return `${answers} answers, all identical in text, tokens and every bit of the logprobs. ${company}`;
  }
  const texts = tally.texts === 1 ? "all with the same text" : `with ${tally.texts} different texts`;
  const changed = fingerprints.size > 1 ? " The server's fingerprint changed in between." : "";
  return `${answers} answers, ${unique.size} of them different, ${texts}. ${company}${changed}`;
}

function showTally(tally, total) {
  $("progress").max = total;
  $("progress").value = tally.answers;
  $("answers-label").textContent = `Answers of ${total}`;
  $("answers").textContent = tally.answers;
  $("unique").textContent = tally.answers ? tally.unique.size : "–";
  $("proof").classList.toggle("differs", tally.unique.size > 1);
  $("batches").textContent = tally.batches.size ? range(tally) : "–";
  showHistogram(tally);
  const { requests, samples, abandoned, refused } = tally.background;
  const sent = `${counted(requests, "request")} with ${counted(samples, "sample")}`;
  const ends = `${abandoned} cancelled midway${refused ? `, ${refused} rejected by the server` : ""}`;
  $("background").textContent = `Background load: ${sent}; ${ends}.`;
  showUnique(tally);
}

function range({ smallestBatch, largestBatch }) {
  return smallestBatch === largestBatch ? `${largestBatch}` : `${smallestBatch}–${largestBatch}`;
}

function showHistogram(tally) {
  const largest = Math.max(FEWEST_COLUMNS, ...tally.batches.keys());
  let width = 1;
  while (largest / width > MAX_COLUMNS) width *= 2;
  const heights = Array(Math.ceil(largest / width)).fill(0);
  for (const [size, tokens] of tally.batches) heights[Math.ceil(size / width) - 1] += tokens;
  const highest = Math.max(1, ...heights);
  const histogram = $("histogram");
  while (histogram.children.length > heights.length) histogram.lastChild.remove();
  while (histogram.children.length < heights.length) histogram.append(document.createElement("span"));
  heights.forEach((tokens, i) => {
    const sizes = width === 1 ? `${i + 1}` : `${i * width + 1}–${(i + 1) * width}`;
    histogram.children[i].style.height = `${(100 * tokens) / highest}%`;
    histogram.children[i].title = `${sizes}: ${counted(tokens, "token")}`;
  });
  $("axis-end").textContent = heights.length * width;
  const sizes = [...tally.batches].sort(([a], [b]) => a - b).map(([size, tokens]) => `${size}: ${tokens}`);
  histogram.setAttribute("aria-label", `Tokens by batch size. ${sizes.join(", ") || "None yet"}`);
}

function showUnique(tally) {
  const list = $("unique-answers");
  const [first] = tally.unique.values();
  [...tally.unique.values()].slice(0, MAX_SHOWN).forEach((one, i) => {
    const item = list.children[i] ?? list.appendChild(uniqueItem(one, first));
    item.firstChild.textContent = `${counted(one.count, "answer")} with SHA-256 `;
    item.firstChild.append(code(one.digest));
  });
  const more = tally.unique.size - MAX_SHOWN;
  if (more <= 0) return;
  const rest = list.children[MAX_SHOWN] ?? list.appendChild(document.createElement("li"));
  rest.textContent = `And ${more} more.`;
}

function uniqueItem({ answer }, { answer: first }) {
  const item = document.createElement("li");
  item.append(paragraph());
  if (answer !== first) item.append(paragraph(...difference(answer, first)));
  if (answer === first || answer.text !== first.text) item.append(textMarkedFrom(answer, divergence(answer, first)));
  return item;
}

/** Describes the first difference between an answer and the first one. */
function difference(answer, first) {
  const index = answer.firstDifference(first);
  if (index < 0) return ["It has the same tokens and logprobs as the first answer, but a different ending."];
  const [token, firstToken] = [answer.tokens[index], first.tokens[index]];
  const place = `It differs from the first answer at token ${index + 1}`;
  if (!token || !firstToken) return [`${place}, where one of the two ends.`];
  if (token.token !== firstToken.token) return [`${place}: `, quoted(token), " instead of ", quoted(firstToken), "."];
  const texts = answer.text === first.text ? "The text is the same." : "The text differs after it.";
  return [`${place}, `, quoted(token), `: logprob ${token.logprob} instead of ${firstToken.logprob}. ${texts}`];
}

/** The index in an answer's text at which the first token that differs from the other answer begins. */
function divergence({ text, tokens }, other) {
  if (text === other.text) return text.length;
  let [common, start] = [0, 0];
  while (common < text.length && text[common] === other.text[common]) common += 1;
  for (let i = 0; i < tokens.length && tokens[i].token === other.tokens[i]?.token; i++) start += tokens[i].token.length;
  return Math.min(common, start); // a token with half a character is longer than its addition to the text
}

/** An answer's text, marked from an index on. */
function textMarkedFrom(answer, start) {
  const element = document.createElement("div");
  element.className = "text";
  element.tabIndex = 0;
  const marked = document.createElement("mark");
  marked.textContent = answer.text.slice(start);
  element.append(answer.text.slice(0, start), marked);
  return element;
}

// --- words and elements ----------------------------------------------------------------------------------------------

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function code(text) {
  const element = document.createElement("span");
  element.className = "code";
  element.textContent = text;
  return element;
}

function quoted({ token }) {
  const element = code(JSON.stringify(token));
  element.classList.add("token");
  return element;
}

function paragraph(...content) {
  const element = document.createElement("p");
  element.append(...content);
  return element;
}

/** Returns a function that draws its latest arguments once per frame. Its `now` draws pending ones immediately. */
function atFrames(draw) {
  let frame = null;
  let latest = [];
  const drawn = () => {
    frame = null;
    draw(...latest);
  };
  const later = (...args) => {
    latest = args;
    frame ??= requestAnimationFrame(drawn);
  };
  later.now = () => {
    if (frame === null) return;
    cancelAnimationFrame(frame);
    drawn();
  };
  return later;
}

// --- the start --------------------------------------------------------------------------------------------------

$("prompt").value = PROMPTS.completion;
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || $("send").disabled) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("ask").addEventListener("change", ({ target }) => {
  const isUntouched = Object.values(PROMPTS).includes($("prompt").value);
  if (target.name === "kind" && isUntouched) $("prompt").value = PROMPTS[target.value];
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.key = $("key").value;
  showModel();
});
startAndStop($("ask"), $("send"), "Send", send);
startAndStop($("prove"), $("prove-button"), "Prove it", proof);
showModel();
