// The page of the service: the query, the grid of photos, and the address, which holds both.
import { WEAK, addressOf, ask, byId, captionsOf, hasKey, nameOf, post, showThumbnail, useKey } from "/api.js";
import { compare, showFormula } from "/compare.js";
import * as viewer from "/viewer.js";

const PAGE = 100; // hits of a further page, which only the embeddings order
const STEP = 20; // photos that are added to the grid at once
const MOST = 10_000; // hits that the service gives of one query
const IMAGE_SIDE = 1024; // an image is made smaller before it is sent
const SIDE = 512; // pixels of a photo in the grid
const UNFILTERED = "uri_raw content_hash status reason detail duplicate_of read_seconds decode_seconds encode_seconds".split(" ");
const INTERNAL = "row_id uri uri_raw size content_hash status reason detail duplicate_of read_seconds decode_seconds encode_seconds".split(" ");

let index; // the description of the index
let image = null; // data URI of the image of the query
let row = null; // row of the query
let running = null; // AbortController of the search that runs
let asked = null; // the body of the search whose photos are shown
let hits = []; // its hits so far
let reranked = 0; // how many of them are re-ranked
let firstWeak = -1; // position of the first weak match among these
let shown = 0; // how many of them are in the grid
let isLast = true; // no hits are left
let isLoading = false;

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("error", isError);
}

function report(error) {
  if (error.name === "AbortError") return;
  const isLocked = error.status === 401;
  byId("key-form").hidden = !isLocked;
  document.body.classList.toggle("locked", isLocked);
  if (!isLocked) return say(error.message.replace(/; the columns are .*/, "; the columns are listed below the filter"), true);
  say(hasKey() ? "This key is not accepted." : "", true);
  byId("key").focus();
}

async function readIndex(signal) {
  index = (await (await ask("/info", { signal })).json()).indexes[0];
}

async function start() {
  byId("query").value = new URLSearchParams(location.search).get("q") ?? "";
  try {
    await readIndex();
  } catch (error) {
    report(error);
    return;
  }
  byId("key-form").hidden = true;
  document.body.classList.remove("locked");
  byId("precision").replaceChildren(...index.precisions.map((name) => new Option(name, name)));
  byId("precision-field").hidden = index.precisions.length < 2;
  byId("pool").max = Math.min(500, Math.max(10, Math.ceil(index.indexed / 10) * 10));
  const offered = Object.entries(index.columns).filter(([name]) => !UNFILTERED.includes(name));
  const described = offered.map(([name, type]) => `${name} (${type})`);
  byId("columns").textContent = `Columns: ${described.join(", ")}`;
  showFormula(index);
  await readAddress();
}

// The address holds the query and the open photo, and `history.state` the image of the query.

function readFields() {
  const parameters = new URLSearchParams(location.search);
  const pool = Number(parameters.get("pool"));
  byId("pool").value = Number.isInteger(pool) && pool >= 10 ? pool : standardPool();
  byId("pool-value").textContent = byId("pool").value;
  const precision = parameters.get("precision");
  byId("precision").value = index.precisions.includes(precision) ? precision : index.precision;
  byId("query").value = parameters.get("q") ?? "";
  byId("where").value = parameters.get("where") ?? "";
  toggle("filter", byId("where").value !== "");
  toggle("compare", parameters.has("compare"));
  useImage(history.state?.image ?? null, rowOf(parameters.get("row")));
}

const standardPool = () => `${Math.min(index.pool, byId("pool").max)}`;
const rowOf = (text) => (/^\d{1,15}$/.test(text ?? "") ? Number(text) : null);

async function readAddress() {
  readFields();
  await search();
  const photo = rowOf(new URLSearchParams(location.search).get("photo"));
  if (photo === null) viewer.close();
  else await openPhoto(photo);
}

function writeAddress(photo = null, replace = false) {
  const values = {
    q: byId("query").value.trim(),
    row,
    where: byId("where").value.trim(),
    precision: byId("precision").value === index.precision ? "" : byId("precision").value,
    pool: byId("pool").value === standardPool() ? "" : byId("pool").value,
    compare: byId("compare").hidden ? "" : "1",
    photo,
  };
  const parameters = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null));
  const address = parameters.size ? `?${parameters}` : location.pathname;
  const state = { image, isOpened: replace ? history.state?.isOpened : photo !== null };
  if (`?${parameters}` === (location.search || "?") && (history.state?.image ?? null) === image) return;
  history[replace ? "replaceState" : "pushState"](state, "", address);
}

const columns = () => Object.keys(index.columns).filter((name) => !INTERNAL.includes(name));

function body() {
  const query = byId("query").value.trim();
  const pool = Number(byId("pool").value);
  const value = { k: pool, pool, precision: byId("precision").value, columns: columns() };
  if (byId("where").value.trim()) value.where = byId("where").value;
  if (image !== null) value.image = image;
  else if (row !== null) value.row_id = row;
  else if (!query) return { ...value, query: "a photo", score: "embedding", k: PAGE, pool: PAGE }; // to look around
  if (!query) return value;
  return { ...value, query, embedding_order: true };
}

// Computes the ranking once; `more` shows it step by step. The index may have changed since the last search `isAnew`.
async function search(isAnew = false) {
  const wanted = body();
  if (!isAnew && JSON.stringify(wanted) === JSON.stringify(asked)) return;
  running?.abort();
  running = new AbortController();
  asked = wanted;
  byId("copy").hidden = image !== null;
  const mine = running;
  say(image === null ? "Searching ..." : "Searching ... The first search by photo also loads the vision tower.");
  document.body.classList.add("busy");
  try {
    if (isAnew) await readIndex(mine.signal);
    wanted.columns = columns();
    const started = performance.now();
    const result = await post("/search", wanted, mine.signal);
    show(result.hits, result.by_embedding !== null ? result.hits.length : 0);
    isLast = result.hits.length < wanted.k;
    say(heading(wanted) + (index.trained ? "" : " The model is untrained: the order has no meaning."));
    compare(result, wanted, performance.now() - started);
    more();
  } catch (error) {
    if (error.name !== "AbortError") {
      asked = null;
      show([]); // the photos of the query before
    }
    report(error);
  } finally {
    if (running === mine) document.body.classList.remove("busy");
  }
}

function heading(wanted) {
  if (!hits.length) return wanted.where === undefined ? "There are no photos." : "No photo passes the filter.";
  const isAll = wanted.score !== undefined && wanted.where === undefined;
  if (isAll && index.deleted) return `All photos in ${index.name}.`; // some of the deleted rows may have no photo
  const count = isAll ? index.indexed.toLocaleString("en") : `${hits.length}${isLast ? "" : "+"}`;
  const order = wanted.score !== undefined ? "" : wanted.query === undefined ? ", most similar first" : ", best first";
  if (firstWeak === 0) return "No strong match among the photos. The nearest come first.";
  if (firstWeak > 0) return `${firstWeak} ${firstWeak === 1 ? "photo matches" : "photos match"}, weaker matches follow.`;
  return `${count} ${count === "1" ? "photo" : "photos"}${wanted.score === undefined ? "" : ` in ${index.name}`}${order}.`;
}

function show(found, count = 0) {
  hits = found;
  reranked = count;
  firstWeak = index.trained ? found.slice(0, count).findIndex((hit) => hit.relevance < WEAK) : -1;
  shown = 0;
  isLast = true;
  isLoading = false;
  byId("photos").replaceChildren();
  byId("more").hidden = true;
}

// Asks for the next hits. Further hits than the pool come in the order of the embeddings.
async function load() {
  const mine = running;
  const { embedding_order, ...query } = asked;
  const score = query.query === undefined ? {} : { score: "embedding" };
  const page = { ...query, ...score, k: PAGE, pool: PAGE, skip: hits.length };
  const found = (await post("/search", page, mine.signal)).hits;
  if (mine !== running) return;
  const known = new Set(hits.map((hit) => hit.row_id));
  isLast = found.length < PAGE || hits.length + 2 * PAGE > MOST;
  hits.push(...found.filter((hit) => !known.has(hit.row_id)));
}

// Adds the next photos to the grid.
async function more() {
  if (isLoading) return;
  isLoading = true;
  const mine = running;
  try {
    if (shown === hits.length && !isLast) await load();
  } catch (error) {
    report(error);
  }
  if (mine !== running) return;
  isLoading = false;
  const next = hits.slice(shown, shown + STEP);
  const items = next.map((hit, at) => photoItem(hit, shown + at));
  const dividers = [[reranked || -1, "Further photos, by embedding only"], [firstWeak, "Weak matches from here"]];
  for (const [at, text] of dividers) {
    if (shown <= at && at < shown + next.length) items.splice(at - shown, 0, divider(text));
  }
  byId("photos").append(...items);
  shown += next.length;
  byId("more").hidden = isLast && shown === hits.length;
  observer.unobserve(byId("more")); // observed anew, it calls again if it is still near the window
  if (next.length) observer.observe(byId("more"));
}

function divider(text) {
  const item = document.createElement("li");
  item.className = "divider soft";
  item.textContent = text;
  return item;
}

function photoItem(hit, at) {
  const item = byId("photo").content.firstElementChild.cloneNode(true);
  const { width, height } = hit.columns;
  item.style.setProperty("--ratio", width && height ? Math.min(3, Math.max(0.5, width / height)) : 4 / 3);
  const [link, picture, text] = [item.querySelector("a"), item.querySelector("img"), item.querySelector("span")];
  const captions = captionsOf(hit);
  text.textContent = captions[0] ?? nameOf(hit);
  item.querySelector("small").textContent = captions.length > 1 ? `+${captions.length - 1}` : "";
  showThumbnail(picture, hit.row_id, SIDE);
  link.href = `?row=${hit.row_id}`;
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    writeAddress(hit.row_id);
    viewer.open(hit, at);
  });
  return item;
}

async function openPhoto(rowId) {
  const at = hits.findIndex((hit) => hit.row_id === rowId);
  let hit = hits[at];
  if (!hit) { // a link to a photo further down
    const only = { query: byId("query").value.trim() || "photo", score: "embedding", where: `row_id = ${rowId}`, k: 1 };
    hit = (await post("/search", { ...only, columns: columns() }).catch(report))?.hits[0];
  }
  if (hit) viewer.open(hit, at);
}

viewer.connect({
  async step(at) {
    if (at === hits.length && !isLast) await load().catch(report);
    if (!hits[at]) return;
    writeAddress(hits[at].row_id, true);
    viewer.open(hits[at], at);
  },
  closed() {
    if (history.state?.isOpened) history.back();
    else writeAddress(null, true);
  },
  similar(hit) {
    byId("query").value = "";
    useImage(null, hit.row_id);
    submit();
    scrollTo({ top: 0 });
  },
});

// The image of the query: chosen, dropped or pasted. The photo of a row may have changed, and cannot be shown then.
byId("chip").querySelector("img").addEventListener("error", () => {
  byId("chip").querySelector("img").removeAttribute("src");
  byId("chip").querySelector("span").textContent = row === null ? "image" : `row ${row}`;
});

function useImage(data, rowId = null) {
  [image, row] = [data, data === null ? rowId : null];
  byId("chip").hidden = image === null && row === null;
  const picture = byId("chip").querySelector("img");
  if (image !== null) picture.src = image;
  else if (row !== null) addressOf(`/thumbnails/${row}`).then((address) => (picture.src = address), report);
  byId("chip").querySelector("span").textContent = "";
}

async function useFile(file) {
  useImage(await shrink(file).catch(() => readAsIs(file))); // the browser may not know the format
  byId("image").value = "";
  submit();
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

function submit() {
  if (!index) return;
  writeAddress();
  search(true);
}

function toggle(id, isOpen) {
  byId(id).hidden = !isOpen;
  byId(`${id}-button`).setAttribute("aria-expanded", isOpen);
  byId("photos").hidden = !byId("compare").hidden;
}

// The last entry is the newest: a busy page is told of several changes at once.
const observer = new IntersectionObserver((entries) => entries.at(-1).isIntersecting && more(), { rootMargin: "1500px" });
byId("more").addEventListener("click", more);
for (const id of ["search", "filter"]) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
}
byId("search").addEventListener("submit", () => matchMedia("(pointer: coarse)").matches && byId("query").blur());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  say("");
  start();
});
for (const id of ["filter", "compare"]) {
  byId(`${id}-button`).addEventListener("click", () => {
    toggle(id, byId(id).hidden);
    if (id === "compare") writeAddress(null, true);
    else byId("where").focus();
  });
}
byId("pool").addEventListener("input", () => (byId("pool-value").textContent = byId("pool").value));
for (const id of ["pool", "precision"]) byId(id).addEventListener("change", submit);
byId("rank-texts").addEventListener("click", async () => {
  const texts = byId("texts").value.split("\n").map((text) => text.trim()).filter(Boolean);
  if (image === null && row === null) return say('Choose an image first, or press "More like this" at a photo.');
  const by = image === null ? { row_id: row } : { image };
  const found = await post("/search/texts", { ...by, texts, precision: byId("precision").value }).catch(report);
  const items = (found?.hits ?? []).map((hit) => {
    const item = document.createElement("li");
    item.dir = "auto";
    item.textContent = `${hit.text} (score ${hit.score.toFixed(2)}, cosine ${hit.embedding_score.toFixed(4)})`;
    return item;
  });
  byId("ranked-texts").replaceChildren(...items);
});
byId("remove").addEventListener("click", () => {
  useImage(null);
  byId("query").focus();
  submit();
});
byId("image").addEventListener("change", (event) => event.target.files[0] && useFile(event.target.files[0]));
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
  byId("drop").hidden = byId("viewer").open;
});
addEventListener("dragleave", (event) => event.relatedTarget === null && (byId("drop").hidden = true));
addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").hidden = true;
  if (event.dataTransfer.files[0]) useFile(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((each) => each.type.startsWith("image/"));
  if (!file) return;
  event.preventDefault();
  useFile(file);
});
addEventListener("keydown", (event) => {
  const isWriting = event.target instanceof HTMLElement && event.target.matches("input:not([type=range]), textarea, select");
  if (event.key !== "/" || isWriting || byId("viewer").open || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  byId("query").focus();
});
addEventListener("popstate", () => index && readAddress());
start();
