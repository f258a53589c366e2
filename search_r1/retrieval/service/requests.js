// Requests of the search page to its server, and their failures as texts to show.

import { say } from "./language.js";

export const TIMEOUT_MS = 120_000;
let token = ""; // in memory only

export const hasToken = () => token !== "";

export function useToken(given) {
  token = given;
}

/** A failure to show: a headline and details, both plain text. */
export class Problem extends Error {
  constructor(headline, details = [], needsToken = false) {
    super(headline);
    Object.assign(this, { details, needsToken });
  }
}

/** Return the JSON response and its headers; network failures and error statuses become a Problem. */
export async function request(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let response, text;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Problem(say("The server took too long."), [say("No answer within {seconds} s.", { seconds: TIMEOUT_MS / 1000 })]);
    throw new Problem(say("The server cannot be reached."), [say("Is it still running, and this machine online?")]);
  }
  if (!response.ok) throw toProblem(response, text);
  try {
    return { body: JSON.parse(text), headers: response.headers };
  } catch {
    throw new Problem(say("The answer is not a retriever's."), [text.slice(0, 200)]);
  }
}

/** Describe an error response for the user. */
function toProblem(response, text) {
  const wait = response.headers.get("Retry-After");
  const busy = `The server is busy or not ready; try again ${wait ? "in {wait} s" : "soon"}.`;
  const noToken = token ? "The server does not accept this token." : "The server asks for an access token.";
  const headlines = {
    400: "The server does not accept this question.",
    401: noToken,
    403: noToken,
    413: "The question is too large for this server.",
    422: "The server does not accept this question.",
    424: "The server or its search service cannot answer this question.",
    429: busy,
    503: busy,
    504: "The search took too long.",
  };
  const headline = say(headlines[response.status] ?? "The search failed (status {status}).", { wait, status: response.status });
  const needsToken = [401, 403].includes(response.status);
  return new Problem(headline, needsToken ? [] : errorDetails(text.slice(0, 2000)), needsToken);
}

/** Return the messages in an error body: FastAPI's `detail`, a string or a list. */
function errorDetails(text) {
  try {
    const { detail } = JSON.parse(text);
    if (Array.isArray(detail)) {
      return detail.map((item) => `${(item.loc ?? []).filter((part) => part !== "body").join(" ")}: ${item.msg}`.replace(/^: /, ""));
    }
    return detail === undefined ? [] : [typeof detail === "string" ? detail : JSON.stringify(detail)];
  } catch {
    return text && !text.trimStart().startsWith("<") ? [text] : [];
  }
}

/** Send JSON and return the response, as `request`. */
export function post(path, body, signal) {
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", headers, body: JSON.stringify(body), signal: signal ? AbortSignal.any([signal, limit]) : limit });
}
