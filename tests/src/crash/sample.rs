//! Some states of a cut that has too many: all pairs of choices against two backgrounds, then
//! seeded samples of every density.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use stepwell_core::io::simulated::{ImageNode, Ino, ROOT, mix};

use super::model::{Change, Choice, Edit, Model, Profile, State, prefix};
use super::{Options, Unread};

/// The kept parts, by the serial of the pending change or edit; `rest` applies to all others.
pub(super) struct Choices {
    pub(super) rest: Choice,
    pub(super) chosen: BTreeMap<u64, Choice>,
    /// The last edit that is kept, where metadata is ordered.
    pub(super) last: Option<u64>,
}

impl Choices {
    fn of(&self, serial: u64) -> Choice {
        self.chosen.get(&serial).copied().unwrap_or(self.rest)
    }
}

/// Visits at most `options.cap` states (with repetitions).
pub(super) fn visit<E>(
    model: &Model,
    options: &Options,
    seed: u64,
    visit: &mut impl FnMut(Arc<ImageNode>) -> Result<(), E>,
) -> Result<(), E> {
    let ordered = options.profile == Profile::OrderedMetadata;
    let pending = pending(model, ordered);
    let prefixes = model.prefixes();
    let mut rng = Rng(seed);
    let mut builder = Builder::new(model, options.unread);
    let mut budget = options.cap;
    let mut plan = pairs(&pending);
    rng.shuffle(&mut plan);
    plan.truncate(options.cap / 2);
    for (chosen, rest) in plan {
        let last = ordered.then(|| rng.pick(&prefixes).unwrap_or(model.floor));
        visit(builder.node(ROOT, &Choices { rest, chosen, last }, false))?;
        budget -= 1;
    }
    while budget > 0 {
        let density = rng.below(16) + 1;
        let chosen = pending
            .iter()
            .map(|&(serial, choices)| {
                let keep = rng.below(17) < density;
                (serial, if keep { 1 + rng.below(u64::from(choices) - 1) as Choice } else { 0 })
            })
            .collect();
        let last = ordered.then(|| rng.pick(&prefixes).unwrap_or(model.floor));
        visit(builder.node(ROOT, &Choices { rest: 0, chosen, last }, false))?;
        budget -= 1;
    }
    Ok(())
}

/// Every pending change with its number of choices. Edits are not chosen one by one where metadata
/// is ordered.
pub(super) fn pending(model: &Model, ordered: bool) -> Vec<(u64, Choice)> {
    let mut all = Vec::new();
    for state in model.reachable().iter().filter_map(|ino| model.inodes.get(ino)) {
        match state {
            State::Dir { pending, .. } if !ordered => {
                all.extend(pending.iter().map(|edit| (edit.serial, Edit::CHOICES)));
            }
            State::File { pending, .. } => {
                all.extend(pending.iter().map(|change| (change.serial, change.choices())));
            }
            State::Dir { .. } | State::Other => {}
        }
    }
    all
}

/// All pairs of choices, with all others kept and with all others lost.
fn pairs(pending: &[(u64, Choice)]) -> Vec<(BTreeMap<u64, Choice>, Choice)> {
    let mut plan = vec![(BTreeMap::new(), 0), (BTreeMap::new(), 1)];
    for (at, &(one, ones)) in pending.iter().enumerate() {
        for &(two, twos) in pending.get(at + 1..).unwrap_or_default() {
            for first in 0..ones {
                for second in 0..twos {
                    for rest in [0, 1] {
                        plan.push((BTreeMap::from([(one, first), (two, second)]), rest));
                    }
                }
            }
        }
    }
    plan
}

pub(super) struct Builder<'a> {
    model: &'a Model,
    unread: Option<Unread>,
    /// Files by inode and what was kept of them.
    files: HashMap<(Ino, Vec<Choice>), Arc<ImageNode>>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(model: &'a Model, unread: Option<Unread>) -> Self {
        Self { model, unread, files: HashMap::new() }
    }

    /// The kept content of the inode. `blind`: nobody reads the bytes below.
    pub(super) fn node(&mut self, ino: Ino, choices: &Choices, blind: bool) -> Arc<ImageNode> {
        match self.model.inodes.get(&ino) {
            Some(State::Dir { durable, pending }) => {
                let entries = if let Some(last) = choices.last {
                    prefix(durable, pending, last)
                } else {
                    let mut entries = durable.clone();
                    let kept = pending.iter().filter(|edit| choices.of(edit.serial) > 0);
                    kept.for_each(|edit| edit.keep(&mut entries));
                    entries
                };
                ImageNode::dir(
                    entries
                        .into_iter()
                        .map(|(name, child)| {
                            let below = blind || self.unread.is_some_and(|unread| unread(&name));
                            let node = self.node(child, choices, below);
                            (name, node)
                        })
                        .collect(),
                )
            }
            Some(State::File { durable, .. }) if blind => ImageNode::file_of(ino, Arc::clone(durable)),
            Some(State::File { durable, pending }) => self.file(ino, durable, pending, choices),
            Some(State::Other) | None => ImageNode::other(),
        }
    }

    fn file(
        &mut self,
        ino: Ino,
        durable: &Arc<Vec<u8>>,
        pending: &[Change],
        choices: &Choices,
    ) -> Arc<ImageNode> {
        let chosen: Vec<Choice> = pending.iter().map(|change| choices.of(change.serial)).collect();
        let made = self.files.entry((ino, chosen)).or_insert_with_key(|(_, chosen)| {
            let mut bytes = Arc::clone(durable);
            for (change, &choice) in pending.iter().zip(chosen).filter(|(_, choice)| **choice > 0) {
                change.keep(choice, Arc::make_mut(&mut bytes));
            }
            ImageNode::file_of(ino, bytes)
        });
        Arc::clone(made)
    }
}

/// A small generator: the same samples for the same seed, on every machine.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, 0x7361_6d70)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    fn pick(&mut self, of: &[u64]) -> Option<u64> {
        of.get(self.below(of.len() as u64) as usize).copied()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}
