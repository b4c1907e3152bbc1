// Requests to the service that the page came from. Nothing else is ever asked.

export const byId = (id) => document.getElementById(id);
const key = () => sessionStorage.getItem("edje-key");

export const hasKey = () => key() !== null;

export function useKey(value) {
  sessionStorage.setItem("edje-key", value.replace(/[^ -~]/g, "?")); // a header holds no other letters, and no key has them
}

// Throws an Error with the message and the status of the service.
export async function ask(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key()) headers.set("Authorization", `Bearer ${key()}`);
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The service cannot be reached. Is it still running?");
  });
  if (answer.ok) return answer;
  let message = `the service answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // not an answer of this service
  }
  throw Object.assign(new Error(message), { status: answer.status });
}

export async function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

// An address that an <img> or a link can use: with a key, the file is fetched first, because links send no headers.
export async function addressOf(path) {
  return key() ? URL.createObjectURL(await (await ask(path)).blob()) : path;
}

export async function showThumbnail(image, row, side) {
  const fail = () => {
    const note = document.createElement("div");
    note.className = "missing";
    note.textContent = "The photo cannot be shown";
    image.replaceWith(note);
  };
  image.addEventListener("error", fail, { once: true });
  try {
    const address = await addressOf(`/thumbnails/${row}?side=${side}`);
    image.addEventListener("load", () => URL.revokeObjectURL(address), { once: true });
    image.src = address;
  } catch {
    fail();
  }
}

// of a file, or of what `split_uri` finds in an archive
const CONTAINER = /^[^]*?\.(tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|tar\.zst|tzst|zip|parquet)!/i;
export const nameOf = (hit) => hit.uri.replace(CONTAINER, "").split("/").pop() || hit.uri;
export const WEAK = 0.5; // relevance
// as `captions_of` a row, without blank captions
const filled = (value) => [value ?? []].flat().filter((text) => `${text}`.trim());
export const captionColumn = ({ columns }) => ["captions", "caption", "text"].find((name) => filled(columns[name]).length);
export const captionsOf = (hit) => filled(hit.columns[captionColumn(hit)]);

export function captionOf(hit) {
  const [first, ...others] = captionsOf(hit);
  return first === undefined ? "" : first + (others.length ? ` +${others.length}` : "");
}
