// The page of the service. It asks only the service that it came from, and shows all text as text.
"use strict";

const byId = (id) => document.getElementById(id);
const HITS = 12;
const IMAGE_SIDE = 1024; // an image is made smaller before it is sent
const PART_NAMES = {
  logit: "logit",
  late: "late interaction",
  pooled: "pooled similarity",
  embedding: "embedding similarity",
  hubness: "hubness correction",
};

let index; // the description of the index
let queryImage = null; // a data URI
let shown = null; // the latest answer, with what was asked
let running = null; // AbortController of the search that runs

function key() {
  return sessionStorage.getItem("edje-key");
}

async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  if (answer.status === 401) byId("key-form").hidden = false;
  let message = `the service answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not an answer of this service
  }
  throw new Error(message);
}

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

function fill(select, names, field) {
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  field.hidden = names.length < 2;
}

function showIndex() {
  fill(byId("precision"), index.precisions, byId("precision-field"));
  const pool = byId("pool");
  pool.max = Math.min(500, Math.max(10, Math.ceil(index.indexed / 10) * 10));
  byId("pool-value").textContent = pool.value;
  byId("columns").textContent =
    "Columns: " + Object.entries(index.columns).map(([name, type]) => `${name} (${type})`).join(", ");
  byId("about").textContent =
    `${index.indexed.toLocaleString("en")} photos in ${index.name}.` +
    (index.trained ? "" : " The model is untrained: the order has no meaning.");
  byId("formula").textContent =
    `Score = ${index.score}. It orders the hits of one query and cannot be compared between queries.`;
}

async function start() {
  try {
    index = (await (await ask("/info")).json()).indexes[0];
  } catch (error) {
    say(error.message, true);
    return;
  }
  byId("key-form").hidden = true;
  showIndex();
  readAddress();
}

// The address of the page holds the search, so that it can be shared.

function readAddress() {
  const parameters = new URLSearchParams(location.search);
  if (index.precisions.includes(parameters.get("precision"))) {
    byId("precision").value = parameters.get("precision");
  }
  const pool = Number(parameters.get("pool"));
  if (Number.isInteger(pool) && pool >= 10) byId("pool").value = pool;
  byId("pool-value").textContent = byId("pool").value;
  byId("query").value = parameters.get("q") ?? "";
  byId("where").value = parameters.get("where") ?? "";
  if (byId("where").value) byId("filter").open = true;
  const row = parameters.get("row");
  if (row !== null && /^\d{1,15}$/.test(row)) search({ row_id: Number(row) }, false);
  else if (byId("query").value.trim()) search({ query: byId("query").value }, false);
}

function writeAddress(what) {
  const parameters = new URLSearchParams();
  if (what.query !== undefined) parameters.set("q", what.query);
  if (what.row_id !== undefined) parameters.set("row", what.row_id);
  if (byId("where").value.trim()) parameters.set("where", byId("where").value);
  if (index.precisions.length > 1) parameters.set("precision", byId("precision").value);
  if (what.query !== undefined) parameters.set("pool", byId("pool").value);
  const text = parameters.toString();
  if (`?${text}` !== location.search) history.pushState(null, "", text ? `?${text}` : location.pathname);
}

async function search(what, remember = true) {
  running?.abort();
  const mine = (running = new AbortController());
  const pool = Number(byId("pool").value);
  const precision = byId("precision").value;
  const body = { ...what, k: Math.min(HITS, pool), pool, precision };
  if (what.query !== undefined) body.embedding_order = true;
  if (byId("where").value.trim()) body.where = byId("where").value;
  say("Searching ...");
  byId("orders").classList.add("busy");
  const started = performance.now();
  try {
    const answer = await ask("/search", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: mine.signal,
    });
    const result = await answer.json();
    if (remember && what.image === undefined) writeAddress(what);
    show(result, what, performance.now() - started);
    await rankTexts(what, mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
  } finally {
    if (running === mine) byId("orders").classList.remove("busy");
  }
}

async function rankTexts(what, signal) {
  const texts = byId("texts").value.split("\n").map((text) => text.trim()).filter(Boolean);
  const isRanked = what.query === undefined && texts.length > 0;
  byId("ranked-texts-section").hidden = !isRanked;
  if (!isRanked) return;
  const pool = Number(byId("pool").value);
  const body = { ...what, texts, k: Math.min(HITS, pool), pool, precision: byId("precision").value };
  byId("ranked-texts").replaceChildren();
  const answer = await ask("/search/texts", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  byId("ranked-texts").replaceChildren(...(await answer.json()).hits.map(textItem));
}

function textItem(hit) {
  const item = document.createElement("li");
  const facts = document.createElement("span");
  facts.className = "soft facts";
  facts.textContent = ` score ${hit.score.toFixed(4)}, cosine ${hit.embedding_score.toFixed(4)}`;
  item.append(hit.text, facts);
  return item;
}

function show(result, what, milliseconds) {
  const isRanked = Array.isArray(result.by_embedding);
  byId("orders").hidden = false;
  byId("orders").classList.toggle("single", !isRanked);
  byId("before-section").hidden = !isRanked;
  const like = what.row_id === undefined ? "the image" : `row ${what.row_id}`;
  const found = result.hits.length ? "Photos by embedding" : "No photos";
  const similar = what.query === undefined ? `Similar photos to ${like}` : found;
  byId("after-title").textContent = isRanked ? `Re-ranked with ${result.precision} tokens` : similar;
  byId("before").replaceChildren(...(result.by_embedding ?? []).map((hit) => card(hit, result, "before")));
  byId("after").replaceChildren(...result.hits.map((hit) => card(hit, result, isRanked ? "after" : "single")));
  byId("share").hidden = what.image !== undefined;
  const timing = result.timing;
  const network = Math.max(0, milliseconds - timing.waited_ms - timing.computed_ms);
  const none = byId("where").value.trim() ? "No photo passes the filter. " : "";
  say(
    `${result.hits.length ? "" : none}${result.hits.length} hits in ${Math.round(milliseconds)} ms: ${Math.round(timing.waited_ms)} ms in the queue, ` +
      `${Math.round(timing.computed_ms)} ms search and re-ranking, ${Math.round(network)} ms network.`,
  );
  byId("stages").textContent = stages(timing.stages_ms);
  byId("changes").textContent = isRanked ? changes(result, what) : "";
  shown = { what, result };
}

function stages(milliseconds) {
  const names = Object.keys(milliseconds).filter((name) => name !== "total");
  const times = names.map((name) => `${name.replace("_", " ")} ${milliseconds[name].toFixed(1)} ms`);
  return `Stages: ${times.join(", ")}.`;
}

function changes(result, what) {
  const before = new Set(result.by_embedding.map((hit) => hit.row_id));
  const entered = result.hits.filter((hit) => !before.has(hit.row_id)).length;
  const stayed = result.hits.filter((hit) => hit.rank === hit.embedding_rank).length;
  let text = `Re-ranking kept ${stayed} of ${result.hits.length} in place and brought ${entered} from further down.`;
  const last = shown?.result;
  if (last && shown.what.query === what.query && last.precision !== result.precision) {
    const known = last.hits.map((hit) => hit.row_id);
    const moved = result.hits.filter((hit, position) => known[position] !== hit.row_id).length;
    text += ` With ${result.precision} instead of ${last.precision}, ${moved} of ${result.hits.length} ranks hold another photo.`;
  }
  return text;
}

function card(hit, result, kind) {
  const item = byId("hit").content.firstElementChild.cloneNode(true);
  const name = hit.uri.split("!").pop().split("/").pop() || hit.uri;
  const inside = (selector) => item.querySelector(selector);
  inside(".rank").textContent = kind === "before" ? hit.embedding_rank : hit.rank;
  inside(".name").textContent = name;
  inside(".name").title = hit.uri;
  inside(".columns").textContent = Object.entries(hit.columns)
    .filter(([, value]) => value !== null)
    .map(([column, value]) => (column === "captions" ? "" : `${column}: `) + [value].flat().join("; "))
    .join(" | ");
  inside(".facts").textContent = `row ${hit.row_id}, cosine ${hit.embedding_score.toFixed(4)}`;
  inside("img").alt = name;
  loadThumbnail(inside("img"), hit.row_id);
  if (kind !== "single") showMovement(inside(".movement"), hit, kind);
  if (kind === "after") showParts(inside(".parts"), hit, result.weights);
  const similar = inside(".similar");
  similar.setAttribute("aria-label", `More like this: ${name}`);
  similar.addEventListener("click", () => {
    byId("query").value = "";
    search({ row_id: hit.row_id });
    scrollTo({ top: 0 });
  });
  return item;
}

function showMovement(element, hit, kind) {
  const moved = hit.embedding_rank - hit.rank;
  const badge = document.createElement("span");
  badge.className = moved > 0 ? "up" : moved < 0 ? "down" : "soft";
  badge.textContent = moved > 0 ? `▲ up ${moved}` : moved < 0 ? `▼ down ${-moved}` : "= stays";
  element.append(kind === "before" ? `re-ranked to ${hit.rank} ` : `by embedding ${hit.embedding_rank} `, badge);
}

function showParts(details, hit, weights) {
  details.hidden = false;
  details.querySelector("summary").textContent = `score ${hit.score.toFixed(2)}`;
  const rows = Object.entries(weights).map(([part, weight]) => {
    const value = hit.parts[part]?.toFixed(4) ?? "not computed";
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = PART_NAMES[part] ?? part;
    row.append(name);
    for (const [text, style] of [[value, ""], [`x ${Number(weight.toPrecision(4))}`, "weight"]]) {
      const cell = row.insertCell();
      cell.textContent = text;
      cell.className = style;
    }
    return row;
  });
  details.querySelector("tbody").replaceChildren(...rows);
}

async function loadThumbnail(image, rowId) {
  const path = `/thumbnails/${rowId}`;
  image.addEventListener("error", () => replaceThumbnail(image), { once: true });
  if (!key()) {
    image.src = path;
    return;
  }
  try {
    const url = URL.createObjectURL(await (await ask(path)).blob());
    image.addEventListener("load", () => URL.revokeObjectURL(url), { once: true });
    image.src = url;
  } catch {
    replaceThumbnail(image);
  }
}

function replaceThumbnail(image) {
  const note = document.createElement("div");
  note.className = "missing";
  note.textContent = "The photo cannot be shown";
  image.replaceWith(note);
}

async function useImage(file) {
  try {
    queryImage = await shrink(file);
  } catch {
    queryImage = await readAsIs(file); // a format that the browser does not know
  }
  byId("query").value = "";
  search({ image: queryImage });
}

async function shrink(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, IMAGE_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function readAsIs(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result.replace(/^data:[^,]*,/, "data:application/octet-stream;base64,")));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function searchAgain() {
  if (byId("query").value.trim()) search({ query: byId("query").value.trim() });
  else if (shown) search(shown.what);
}

byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const query = byId("query").value.trim();
  if (query) search({ query });
  else say("Write a query, or choose an image.");
});
byId("rank-texts").addEventListener("click", () => {
  if (shown && shown.what.query === undefined) search(shown.what);
  else say('Choose an image first, or press "More like this" at a photo.');
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("edje-key", byId("key").value.trim());
  byId("key").value = "";
  say("");
  start();
});
byId("pool").addEventListener("input", () => (byId("pool-value").textContent = byId("pool").value));
byId("pool").addEventListener("change", searchAgain);
byId("precision").addEventListener("change", searchAgain);
byId("image").addEventListener("change", (event) => event.target.files[0] && useImage(event.target.files[0]));
byId("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is copied.");
  } catch {
    say(`The link: ${location.href}`); // pages without TLS may not write to the clipboard
  }
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  byId("drop").classList.add("over");
});
addEventListener("dragleave", () => byId("drop").classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").classList.remove("over");
  const file = event.dataTransfer.files[0];
  if (file) useImage(file);
});
addEventListener("keydown", (event) => {
  const isWriting = event.target instanceof HTMLElement && event.target.matches("input[type=search], input[type=text], input[type=password], textarea");
  if (event.key === "/" && !isWriting && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId("query").focus();
  } else if (event.key === "Escape") {
    byId("query").value = "";
    byId("query").focus();
  }
});
addEventListener("popstate", readAddress);
start();
