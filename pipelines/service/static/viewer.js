// One photo, large: with its caption, its columns, and what to do with it.
import { addressOf, byId, captionColumn, captionsOf, hasKey, nameOf } from "/api.js";

const SIDE = 1600; // pixels

let current = null;
let position = -1; // of the photo among the hits; -1 if it is not one of them
let handlers;
let isClosing = false; // because the address has changed

export function connect(page) {
  handlers = page;
}

export function open(hit, at) {
  current = hit;
  position = at;
  const captions = captionsOf(hit);
  byId("caption").textContent = captions[0] ?? nameOf(hit);
  byId("captions").replaceChildren(...captions.slice(1).map((text) => element("li", text)));
  const { [captionColumn(hit)]: _, width, height, ...columns } = hit.columns;
  const values = {
    file: location_(hit.uri),
    size: width && height ? `${width} x ${height} pixels` : null,
    ...columns,
    rank: at < 0 ? null : `${at + 1}`,
    relevance: hit.relevance?.toFixed(2) ?? null,
    row: `${hit.row_id}`,
  };
  const rows = Object.entries(values).filter(([, value]) => value !== null);
  byId("values").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  byId("previous").disabled = at <= 0;
  byId("next").disabled = at < 0;
  showLarge(hit);
  if (!byId("viewer").open) byId("viewer").showModal();
  byId("viewer").scrollTop = 0;
}

export function close() {
  isClosing = true;
  byId("viewer").close();
  isClosing = false;
}

async function showLarge(hit) {
  const large = byId("large");
  large.alt = captionsOf(hit)[0] ?? nameOf(hit);
  large.classList.add("loading");
  large.hidden = false;
  byId("no-photo").hidden = true;
  byId("download").href = `/photos/${hit.row_id}`;
  byId("download").download = nameOf(hit);
  try {
    const address = await addressOf(`/thumbnails/${hit.row_id}?side=${SIDE}`);
    if (hit === current) large.src = address;
  } catch {
    if (hit === current) fail();
  }
}

function fail() {
  byId("large").hidden = true;
  byId("no-photo").hidden = false;
}

function element(name, content) {
  const node = document.createElement(name);
  node.dir = "auto";
  node.append(Array.isArray(content) ? content.join("; ") : content instanceof Node ? content : `${content}`);
  return node;
}

function location_(uri) {
  if (!/^https?:\/\//.test(uri)) return uri;
  const link = element("a", uri);
  link.href = uri;
  link.rel = "noreferrer noopener";
  return link;
}

byId("large").addEventListener("load", () => {
  byId("large").classList.remove("loading");
  URL.revokeObjectURL(byId("large").src);
});
byId("large").addEventListener("error", fail);
byId("previous").addEventListener("click", () => handlers.step(position - 1));
byId("next").addEventListener("click", () => handlers.step(position + 1));
byId("close").addEventListener("click", () => byId("viewer").close());
byId("similar").addEventListener("click", () => {
  close();
  handlers.similar(current);
});
byId("download").addEventListener("click", async (event) => {
  if (!hasKey() || byId("download").href.startsWith("blob:")) return;
  event.preventDefault();
  byId("download").href = await addressOf(`/photos/${current.row_id}`);
  byId("download").click();
});
byId("viewer").addEventListener("close", () => isClosing || handlers.closed());
byId("viewer").addEventListener("click", (event) => event.target === byId("viewer") && byId("viewer").close());
byId("viewer").addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowLeft" && position > 0) handlers.step(position - 1);
  if (event.key === "ArrowRight" && position >= 0) handlers.step(position + 1);
});
