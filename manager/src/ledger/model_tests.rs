//! Every order of events around the ledger: two writers, a rank that gives an attempt up, and a
//! store that loses answers, says "exists" for what it has just stored, lets writes land late and
//! deletes low entries.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;

use super::append::{Append, AppendVerdict, Next, PutOutcome, Request, StoreAnswer};
use super::entry::{Change, Entry, Named};

/// Entries that are never deleted.
const KEPT: usize = 2;
/// All attempts. A set of them has a bit for each.
const ATTEMPTS: [&str; 3] = [REMOVED, "a2", "b3"];
/// The only attempt that some change takes away, and its bit.
const REMOVED: &str = "a1";
const BIT_OF_REMOVED: u8 = 1;

fn set<'a>(attempts: impl IntoIterator<Item = &'a String>) -> u8 {
    let bit = |attempt: &String| ATTEMPTS.iter().position(|known| known == attempt).map_or(0, |at| 1 << at);
    attempts.into_iter().fold(0, |set, attempt| set | bit(attempt))
}

/// A process that makes changes, one after the other.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Actor {
    name: &'static str,
    session: &'static str,
    changes: Rc<[Change]>,
    /// The number of changes that have begun.
    begun: usize,
    running: Option<(Rc<Append>, Request)>,
    hurries: u8,
}

impl Actor {
    fn new(name: &'static str, session: &'static str, changes: Vec<Change>) -> Self {
        Self { name, session, changes: changes.into(), begun: 0, running: None, hurries: 0 }
    }
}

fn commit(step: &str, attempt: &str, remove: Option<(&str, &str)>) -> Change {
    let named =
        Named { attempt: attempt.to_owned(), manifest: String::new(), manifest_bytes: 0, manifest_crc: 0 };
    Change::Names {
        remove: remove.into_iter().map(|(name, attempt)| (name.to_owned(), attempt.to_owned())).collect(),
        add: [(step.to_owned(), named)].into(),
    }
}

/// An event, for people.
#[derive(Debug)]
#[expect(dead_code, reason = "its fields are printed")]
enum Event {
    Begins(&'static str),
    TimeIsOver(&'static str),
    Answer(&'static str, StoreAnswer),
    LandsLate(Arc<Entry>),
    LowestIsDeleted,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    entries: BTreeMap<u64, Arc<Entry>>,
    /// Writes that may still land, by nonce.
    late: BTreeMap<String, Arc<Entry>>,
    actors: Vec<Actor>,
    /// The number of faults to come.
    faults: u8,
    /// All attempts that had a name once.
    named: u8,
    /// Attempts that will never have a name, as somebody was told.
    never: u8,
}

impl World {
    /// `is_short`: the leader does not commit the step that is taken away later.
    fn new(faults: u8, is_short: bool) -> Self {
        let mut leader = vec![
            Change::TakeOver { from: String::new() },
            commit("1", REMOVED, None),
            commit("2", "a2", Some(("1", REMOVED))),
        ];
        if is_short {
            leader.remove(1);
        }
        let next = vec![Change::TakeOver { from: "A".to_owned() }, commit("3", "b3", Some(("1", REMOVED)))];
        Self {
            entries: BTreeMap::new(),
            late: BTreeMap::new(),
            actors: vec![
                Actor::new("leader", "A", leader),
                Actor::new("rank", "A", vec![Change::GiveUp("a2".to_owned())]),
                Actor::new("next", "B", next),
            ],
            faults,
            named: 0,
            never: 0,
        }
    }

    fn highest(&self) -> Option<&Arc<Entry>> {
        self.entries.values().next_back()
    }

    fn attempts(&self) -> u8 {
        self.highest().map_or(0, |entry| set(entry.names.values().map(|named| &named.attempt)))
    }

    /// Stores an entry if its number is free, and says whether it was. Checks a new highest entry.
    fn store(&mut self, entry: &Arc<Entry>) -> bool {
        if self.entries.contains_key(&entry.number) {
            return false;
        }
        let (below, before) = (self.highest().cloned(), self.attempts());
        self.entries.insert(entry.number, Arc::clone(entry));
        if below.as_ref().is_some_and(|below| entry.number < below.number) {
            return true; // It has no effect.
        }
        assert_eq!(entry.number, below.as_ref().map_or(0, |below| below.number + 1), "a gap");
        assert_eq!(entry.previous, below.as_ref().map(|below| below.nonce.clone()), "not made for this one");
        assert!(below.is_none_or(|below| entry.epoch >= below.epoch), "an earlier writer changed the root");
        let after = self.attempts();
        assert_eq!(before & !after & !BIT_OF_REMOVED, 0, "an attempt is lost");
        assert_eq!(after & self.never, 0, "an attempt came that never should");
        self.named |= after;
        true
    }

    /// Returns the events that may be next.
    fn events(&self) -> Vec<(Event, Self)> {
        let mut found = Vec::new();
        for (number, actor) in self.actors.iter().enumerate() {
            let name = actor.name;
            let Some((_, request)) = &actor.running else {
                found.extend(self.begin(number).map(|world| (Event::Begins(name), world)));
                continue;
            };
            found.extend(self.hurry(number).map(|world| (Event::TimeIsOver(name), world)));
            for (world, answer) in self.answers(request) {
                found.push((Event::Answer(name, answer.clone()), world.answered(number, answer)));
            }
        }
        for (nonce, entry) in &self.late {
            let mut world = self.clone();
            world.late.remove(nonce);
            world.store(entry);
            found.push((Event::LandsLate(Arc::clone(entry)), world));
        }
        if self.entries.len() > KEPT {
            let mut world = self.clone();
            world.entries.pop_first();
            found.push((Event::LowestIsDeleted, world));
        }
        found
    }

    /// An actor begins its next change. All but the leader wait until the leader has the root.
    fn begin(&self, number: usize) -> Option<Self> {
        let actor = &self.actors[number];
        let change = actor.changes.get(actor.begun)?;
        if number > 0 && actor.begun == 0 && !self.entries.values().any(|entry| entry.session == "A") {
            return None;
        }
        let mut world = self.clone();
        let nonce = format!("{}{}-", actor.name, actor.begun);
        let (append, request) = Append::new(actor.session, "", change.clone(), nonce);
        world.actors[number].running = Some((append.into(), request));
        world.actors[number].begun += 1;
        world.actors[number].hurries = 0;
        Some(world)
    }

    /// The time of an actor is over, for the first or second time. That is a fault too.
    fn hurry(&self, number: usize) -> Option<Self> {
        let mut world = self.with_a_fault()?;
        let actor = &mut world.actors[number];
        if actor.hurries == 2 {
            return None;
        }
        actor.hurries += 1;
        Rc::make_mut(&mut actor.running.as_mut()?.0).hurry();
        Some(world)
    }

    fn with_a_fault(&self) -> Option<Self> {
        let faults = self.faults.checked_sub(1)?;
        Some(Self { faults, ..self.clone() })
    }

    /// All answers to a request, each with what it did to the store.
    fn answers(&self, request: &Request) -> Vec<(Self, StoreAnswer)> {
        let mut found = Vec::new();
        let failed = match request {
            Request::Highest => {
                found.push((self.clone(), StoreAnswer::Highest(self.highest().map(|entry| entry.number))));
                StoreAnswer::Failed
            }
            Request::Get(number) => {
                found.push((self.clone(), StoreAnswer::Entry(self.entries.get(number).cloned())));
                StoreAnswer::Failed
            }
            Request::Create(entry) => {
                let mut world = self.clone();
                let outcome = if world.store(entry) { PutOutcome::Stored } else { PutOutcome::Exists };
                found.push((world, StoreAnswer::Put(outcome)));
                // Stored, but the answer is lost; or a library on the way tried it again.
                for outcome in [PutOutcome::Unknown, PutOutcome::Exists] {
                    if let Some(mut world) = self.with_a_fault() {
                        world.store(entry);
                        found.push((world, StoreAnswer::Put(outcome)));
                    }
                }
                // Not stored, but the store says that somebody else writes.
                found.extend(self.with_a_fault().map(|world| (world, StoreAnswer::Put(PutOutcome::Exists))));
                if let Some(mut world) = self.with_a_fault() {
                    world.late.insert(entry.nonce.clone(), Arc::clone(entry));
                    found.push((world, StoreAnswer::Put(PutOutcome::Unknown)));
                }
                // Not stored.
                StoreAnswer::Put(PutOutcome::Unknown)
            }
        };
        found.extend(self.with_a_fault().map(|world| (world, failed)));
        found
    }

    fn answered(mut self, number: usize, answer: StoreAnswer) -> Self {
        let actor = &mut self.actors[number];
        let Some((append, request)) = &mut actor.running else { return self };
        match Rc::make_mut(append).answered(answer) {
            Next::Ask(next) => *request = next,
            Next::End(verdict) => {
                actor.running = None;
                let change = actor.changes[actor.begun - 1].clone();
                if matches!(change, Change::TakeOver { .. }) && !matches!(verdict, AppendVerdict::Done(_)) {
                    actor.changes = Rc::new([]); // It is no writer.
                }
                self.check(&change, &verdict);
            }
        }
        self
    }

    /// Checks what somebody is told at the end of a change.
    fn check(&mut self, change: &Change, verdict: &AppendVerdict) {
        let added = match change {
            Change::Names { add, .. } => set(add.values().map(|named| &named.attempt)),
            Change::GiveUp(attempt) => set([attempt]),
            Change::TakeOver { .. } => 0,
        };
        let is_never = match (change, verdict) {
            (_, AppendVerdict::Deleted) => panic!("nobody has deleted the root"),
            // Nothing is said, or the attempt was not given up.
            (_, AppendVerdict::Fenced | AppendVerdict::Uncertain(_))
            | (Change::TakeOver { .. }, _)
            | (Change::GiveUp(_), AppendVerdict::Never) => return,
            (Change::GiveUp(_), AppendVerdict::Done(_))
            | (Change::Names { .. }, AppendVerdict::Never | AppendVerdict::TooLate) => true,
            (Change::GiveUp(_), AppendVerdict::TooLate) | (Change::Names { .. }, AppendVerdict::Done(_)) => {
                false
            }
        };
        assert_eq!(self.named & added, if is_never { 0 } else { added }, "{change:?} ended with {verdict:?}");
        if is_never {
            self.never |= added;
        }
    }
}

/// Tries all orders of events with so many faults. Returns the number of states.
fn explore(faults: u8, is_short: bool) -> usize {
    let seed = RandomState::new();
    let fingerprint = |world: &World| seed.hash_one(world);
    let begin = World::new(faults, is_short);
    // The state before each state.
    let mut seen = HashMap::from([(fingerprint(&begin), None)]);
    let mut open = vec![begin];
    while let Some(world) = open.pop() {
        let from = fingerprint(&world);
        let events = catch_unwind(AssertUnwindSafe(|| world.events())).unwrap_or_else(|failure| {
            tell(World::new(faults, is_short), from, &seen, fingerprint);
            resume_unwind(failure)
        });
        for (_, next) in events {
            seen.entry(fingerprint(&next)).or_insert_with(|| {
                open.push(next);
                Some(from)
            });
        }
    }
    seen.len()
}

/// Prints the events that led to a state.
fn tell(mut world: World, to: u64, seen: &HashMap<u64, Option<u64>>, fingerprint: impl Fn(&World) -> u64) {
    let mut way = vec![to];
    while let Some(Some(from)) = way.last().and_then(|last| seen.get(last)) {
        way.push(*from);
    }
    for next in way.into_iter().rev().skip(1) {
        let Some((event, after)) = world.events().into_iter().find(|(_, after)| fingerprint(after) == next)
        else {
            return;
        };
        println!("{event:?}");
        world = after;
    }
}

#[test]
fn no_order_of_events_breaks_a_promise() {
    let is_long = std::env::var_os("STEPWELL_LONG").is_some();
    let long_runs: &[_] = if is_long { &[(1, false), (2, true)] } else { &[] };
    for &(faults, is_short) in [(0, false), (1, true)].iter().chain(long_runs) {
        println!("{faults} faults: {} states", explore(faults, is_short));
    }
}
