//! The paths below `/_control/`, by any method.
//!
//! * `requests`: the requests since the last reset by kind, and the bytes of their bodies.
//! * `reset`: sets these counts to 0.
//! * `faults`: a JSON body such as `{"seed": 7, "rate": 0.1, "kinds": ["drop"], "only": ["part"],
//!   "limit": 100}`. A request of the kinds `only` (of every kind without it) is hit with the
//!   probability `rate`, at most `limit` times in all. An empty body ends it. See [`Fault`].
//! * `redirect`: `{"region": "eu-west-1"}`. S3 answers that the bucket is there. An empty body ends
//!   it.
//! * `latency`: `{"milliseconds": 30}`. Each answer waits for so long.
//! * `most`: `{"requests": 4}`. More parts and ranges than so many at once get 503.
//! * `page`: `{"entries": 2}`. Pages of listings have at most so many entries.
//! * `expire`: `{"token": "old"}`. Credentials that contain this text have expired.
//! * `halt`: `{"after": 12, "applied": true}`. The server answers 12 more requests. It applies the
//!   next one (without `applied` it does not), and no later one. These get no answer. An empty body
//!   ends it: their connections close, and other requests are answered.
//! * `halted`: true if a request waits because of `halt`.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

use crate::call::KINDS;
use crate::http::Answer;

/// A fault of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is applied. The connection closes without an answer.
    Drop,
    /// 503, and not applied.
    Unavailable,
    /// 409, and not applied. A request that is no create gets 503.
    Conflict,
    /// Half of the body of a GET. Then the connection closes.
    Cut,
    /// One bit of the body of a ranged GET is wrong.
    Wrong,
    /// The answer comes two seconds late.
    Slow,
    /// The connection closes at once. A create, put or complete is applied one second later.
    Late,
    /// 502 with a page of HTML, and not applied.
    Html,
    /// 500, and not applied.
    Forget,
    /// 429, and not applied.
    Busy,
    /// The credentials have expired.
    Expire,
    /// 200 with a page of HTML, as of a proxy that wants a login, and not applied.
    Login,
    /// It is applied, and the answer comes after those of later requests.
    Reorder,
}

impl Fault {
    fn named(name: &str) -> Option<Self> {
        Some(match name {
            "drop" => Self::Drop,
            "unavailable" => Self::Unavailable,
            "conflict" => Self::Conflict,
            "cut" => Self::Cut,
            "wrong" => Self::Wrong,
            "slow" => Self::Slow,
            "late" => Self::Late,
            "html" => Self::Html,
            "forget" => Self::Forget,
            "busy" => Self::Busy,
            "expire" => Self::Expire,
            "login" => Self::Login,
            "reorder" => Self::Reorder,
            _ => return None,
        })
    }

    /// True if this kind of request can have it.
    fn hits(self, kind: &str) -> bool {
        match self {
            Self::Cut => matches!(kind, "get" | "range"),
            Self::Wrong => kind == "range",
            Self::Late => matches!(kind, "create" | "put" | "complete"),
            _ => true,
        }
    }
}

/// The faults that requests get, by a seeded generator.
#[derive(Debug)]
struct Faults {
    random: u64,
    rate: f64,
    kinds: Vec<Fault>,
    only: Option<Vec<String>>,
    left: u64,
}

/// The largest integer that a `f64` holds with all smaller ones, and 1.
const FLOAT_RANGE: u64 = 1 << 53;

impl Faults {
    fn parse(body: &Value) -> Option<Self> {
        let texts = |name: &str| -> Option<Vec<String>> {
            let texts = body.get(name)?.as_array()?.iter().map(|text| text.as_str().map(str::to_owned));
            texts.collect()
        };
        let only = match body.get("only") {
            Some(_) => {
                Some(texts("only").filter(|only| only.iter().all(|kind| KINDS.contains(&kind.as_str())))?)
            }
            None => None,
        };
        let number = |name: &str, default| body.get(name).map_or(Some(default), Value::as_u64);
        Some(Self {
            random: number("seed", 0)?,
            rate: body.get("rate").map_or(Some(1.0), Value::as_f64)?,
            kinds: texts("kinds")?.iter().map(|name| Fault::named(name)).collect::<Option<_>>()?,
            only,
            left: number("limit", u64::MAX)?,
        })
    }

    /// The next number of the generator splitmix64.
    fn next(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The fault of a request of this kind.
    fn roll(&mut self, kind: &str) -> Option<Fault> {
        let is_meant = self.only.as_ref().is_none_or(|only| only.iter().any(|one| one == kind));
        let possible: Vec<Fault> = self.kinds.iter().copied().filter(|fault| fault.hits(kind)).collect();
        if !is_meant || possible.is_empty() || self.left == 0 {
            return None;
        }
        if (self.next() % FLOAT_RANGE) as f64 >= self.rate * FLOAT_RANGE as f64 {
            return None;
        }
        self.left -= 1;
        let choice = self.next() % possible.len() as u64;
        possible.get(choice as usize).copied()
    }
}

/// A stop of the server, as a client sees it that is killed meanwhile.
#[derive(Debug)]
struct Halt {
    /// The requests that are answered until then.
    left: u64,
    /// The next request is applied.
    is_applied: bool,
    is_reached: bool,
}

impl Halt {
    /// Counts a request. True for one that gets no answer, and whether it is applied.
    fn stops(&mut self) -> Option<bool> {
        let Some(left) = self.left.checked_sub(1) else {
            let is_first = !std::mem::replace(&mut self.is_reached, true);
            return Some(is_first && self.is_applied);
        };
        self.left = left;
        None
    }
}

/// The faults and delays of one request.
#[derive(Debug)]
pub struct Plan {
    /// The request gets no answer, and is applied or not.
    pub halted: Option<bool>,
    pub fault: Option<Fault>,
    /// A random number for the fault.
    pub random: u64,
    pub latency: Duration,
    /// It is one request too many.
    pub is_excess: bool,
    /// The region that S3 redirects to.
    pub region: Option<String>,
    /// The most entries of a page.
    pub page: Option<u64>,
    /// True if the credentials have expired.
    pub is_expired: bool,
}

#[derive(Default)]
struct State {
    counts: BTreeMap<&'static str, u64>,
    bytes_in: u64,
    bytes_out: u64,
    hits: u64,
    faults: Option<Faults>,
    region: Option<String>,
    latency: Duration,
    /// The most parts and ranges at once.
    most: Option<u64>,
    /// The parts and ranges that are answered now.
    running: u64,
    expired: Option<String>,
    page: Option<u64>,
    halt: Option<Halt>,
    /// The answers so far.
    answered: u64,
}

fn is_data(kind: &str) -> bool {
    matches!(kind, "part" | "range")
}

/// The longest that an answer waits for later ones.
const REORDERED: Duration = Duration::from_millis(300);

/// The counts and faults of a server.
#[derive(Default)]
pub struct Control {
    state: Mutex<State>,
    changed: Condvar,
}

impl Control {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request of a kind. `credentials` are the texts that may name an expired token.
    pub fn begin(&self, kind: &'static str, bytes_in: u64, credentials: &[&str]) -> Plan {
        let mut state = self.state();
        *state.counts.entry(kind).or_default() += 1;
        state.bytes_in += bytes_in;
        let fault = state.faults.as_mut().and_then(|faults| faults.roll(kind));
        let random = state.faults.as_mut().map_or(0, Faults::next);
        state.hits += u64::from(fault.is_some());
        let expired = state.expired.as_deref();
        let is_expired = expired.is_some_and(|token| credentials.iter().any(|text| text.contains(token)));
        let is_excess = is_data(kind) && state.most.is_some_and(|most| state.running >= most);
        state.running += u64::from(is_data(kind));
        let halted = state.halt.as_mut().and_then(Halt::stops);
        Plan {
            halted,
            fault,
            random,
            latency: state.latency,
            is_excess,
            region: state.region.clone(),
            page: state.page,
            is_expired,
        }
    }

    /// Counts the end of a request of a kind.
    pub fn end(&self, kind: &str) {
        let mut state = self.state();
        state.running -= u64::from(is_data(kind));
    }

    /// Counts an answer and its bytes.
    pub fn sent(&self, bytes: u64) {
        let mut state = self.state();
        state.bytes_out += bytes;
        state.answered += 1;
        self.changed.notify_all();
    }

    /// Waits until `halt` ends.
    pub fn wait_for_halt(&self) {
        let is_halted = |state: &mut State| state.halt.is_some();
        drop(self.changed.wait_while(self.state(), is_halted));
    }

    /// Waits for so many answers to other requests, for a while.
    pub fn wait_for_answers(&self, number: u64) {
        let state = self.state();
        let wanted = state.answered + number;
        let is_early = |state: &mut State| state.answered < wanted;
        drop(self.changed.wait_timeout_while(state, REORDERED, is_early));
    }

    /// Answers a request of a path below `/_control/`.
    pub fn answer(&self, path: &str, body: &[u8]) -> Answer {
        let value = if body.is_empty() { Some(Value::Null) } else { serde_json::from_slice(body).ok() };
        match value.and_then(|value| self.change(path, &value)) {
            Some(value) => Answer::new(200, "application/json", value.to_string()),
            None => Answer::new(400, "text/plain", "the path or the body is not understood\n"),
        }
    }

    fn change(&self, path: &str, body: &Value) -> Option<Value> {
        let mut state = self.state();
        let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
        match path {
            "requests" => {
                let count = |kind: &&'static str| {
                    let count = state.counts.get(kind).copied().unwrap_or_default();
                    ((*kind).to_owned(), json!(count))
                };
                let mut found: serde_json::Map<String, Value> = KINDS.iter().map(count).collect();
                found.insert("bytes_in".to_owned(), json!(state.bytes_in));
                found.insert("bytes_out".to_owned(), json!(state.bytes_out));
                found.insert("faults".to_owned(), json!(state.hits));
                return Some(Value::Object(found));
            }
            "reset" => {
                state.counts.clear();
                (state.bytes_in, state.bytes_out, state.hits) = (0, 0, 0);
            }
            "faults" => state.faults = if body.is_null() { None } else { Some(Faults::parse(body)?) },
            "redirect" => state.region = if body.is_null() { None } else { Some(text("region")?) },
            "latency" => {
                let wanted = body.get("milliseconds").map_or(Some(0), Value::as_u64)?;
                state.latency = Duration::from_millis(wanted);
            }
            "most" => {
                let most = |body: &Value| body.get("requests")?.as_u64();
                state.most = if body.is_null() { None } else { Some(most(body)?) };
            }
            "page" => {
                let entries = |body: &Value| body.get("entries")?.as_u64().filter(|entries| *entries > 0);
                state.page = if body.is_null() { None } else { Some(entries(body)?) };
            }
            "halt" => {
                let after = || body.get("after")?.as_u64();
                let applied = || body.get("applied").map_or(Some(false), Value::as_bool);
                let halt = || Some(Halt { left: after()?, is_applied: applied()?, is_reached: false });
                state.halt = if body.is_null() { None } else { Some(halt()?) };
                self.changed.notify_all();
            }
            "halted" => return Some(json!(state.halt.as_ref().is_some_and(|halt| halt.is_reached))),
            "expire" => state.expired = if body.is_null() { None } else { Some(text("token")?) },
            _ => return None,
        }
        Some(json!({}))
    }
}
