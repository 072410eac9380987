//! The meeting of the ranks that open one manager: each introduces itself, and the leader checks
//! that their settings are equal.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stepwell_core::deadline::deadline_after;

use super::Team;
use super::board::{Board, decoded, encoded};
use crate::coordination::{Coordinator, LEADER};
use crate::error::{Error, Relayed, Result};
use crate::runs::repeats;

/// A rank's introduction when it arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    /// The version of stepwell. All ranks must make the same plans.
    version: String,
    /// The path that it opens.
    path: String,
    /// The name of its machine.
    node: String,
    /// Its socket on that machine, if it is bound to one.
    socket: Option<u32>,
    /// The settings that must be equal on all ranks, each with its name.
    settings: Vec<(String, String)>,
}

/// The leader's welcome.
#[derive(Serialize, Deserialize)]
struct Welcome {
    session: String,
    places: Places,
}

impl Team {
    /// Meets the other ranks that open `path`. The settings must be equal on all ranks. On the
    /// leader, `lead` runs once all ranks have come. All ranks get the session that it returns, or
    /// its failure.
    pub fn meet(
        coordinator: &Arc<dyn Coordinator>,
        path: &str,
        settings: Vec<(String, String)>,
        timeout: Duration,
        lead: impl FnOnce() -> Result<String>,
    ) -> Result<Self> {
        let namespace = coordinator.namespace();
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            path: path.to_owned(),
            node: coordinator.node(),
            socket: coordinator.socket(),
            settings,
        };
        let (rank, size) = (coordinator.rank(), coordinator.world_size());
        let board = Board { coordinator, timeout };
        let welcome_key = format!("{namespace}/welcome");
        let Welcome { session, places } = if rank == LEADER {
            let places = board.gather_hellos(&namespace, &hello, size);
            let welcome = places.and_then(|places| Ok(Welcome { session: lead()?, places }));
            coordinator.put(&welcome_key, &encoded(&welcome.as_ref().map_err(Relayed::of))?)?;
            welcome?
        } else {
            coordinator.put(&format!("{namespace}/hello/{rank}"), &encoded(&hello)?)?;
            board.answer(&welcome_key, "to open")?
        };
        Ok(Self::new(Arc::clone(coordinator), namespace, session, places, timeout))
    }
}

impl Board<'_> {
    /// Collects the introductions of all ranks. Fails if a rank has other settings.
    fn gather_hellos(&self, namespace: &str, own: &Hello, size: u32) -> Result<Places> {
        let mut nodes = Numbered::default();
        let mut sockets = Numbered::default();
        nodes.add(own.node.clone());
        sockets.add((own.node.clone(), own.socket));
        let deadline = deadline_after(self.timeout);
        let begun = Instant::now();
        for rank in 1..size {
            let key = format!("{namespace}/hello/{rank}");
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(message) = self.coordinator.get(&key, left)? else {
                let mut missing = Vec::new();
                for rank in rank..size {
                    if self.coordinator.get(&format!("{namespace}/hello/{rank}"), Duration::ZERO)?.is_none() {
                        missing.push(rank);
                    }
                }
                let seconds = begun.elapsed().as_secs_f64();
                let waited_for = format!("to open {}", own.path);
                return Err(Error::CoordinationTimeout { missing, waited_for, seconds });
            };
            let hello: Hello = decoded(rank, &message)?;
            own.check(rank, &hello)?;
            nodes.add(hello.node.clone());
            sockets.add((hello.node, hello.socket));
        }
        Ok(Places { nodes: nodes.numbers, sockets: sockets.numbers })
    }
}

/// The node and socket number of each rank. Ranks of one node are mostly adjacent, so it is encoded
/// as repeats.
#[derive(Serialize, Deserialize)]
pub(super) struct Places {
    #[serde(with = "repeats")]
    pub nodes: Vec<u32>,
    #[serde(with = "repeats")]
    pub sockets: Vec<u32>,
}

/// Numbers names in the order of their first occurrence.
struct Numbered<T> {
    known: HashMap<T, u32>,
    /// The number of each added name.
    numbers: Vec<u32>,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), numbers: Vec::new() }
    }
}

impl<T: Eq + Hash> Numbered<T> {
    fn add(&mut self, name: T) {
        let next = self.known.len() as u32;
        self.numbers.push(*self.known.entry(name).or_insert(next));
    }
}

impl Hello {
    /// Checks that another rank has the same settings as the leader, which `self` is of.
    fn check(&self, rank: u32, other: &Self) -> Result<()> {
        let differ = |what: &str, here: &str, there: &str| {
            Err(Error::Invalid(format!(
                "the ranks have different values of {what}: {here} on rank {LEADER}, {there} on rank {rank}. Pass the same value on all ranks"
            )))
        };
        if self.version != other.version {
            return differ("the stepwell version", &self.version, &other.version);
        }
        if self.path != other.path {
            return differ("the path", &self.path, &other.path);
        }
        for ((name, here), (_, there)) in self.settings.iter().zip(&other.settings) {
            if here != there {
                return differ(name, here, there);
            }
        }
        Ok(())
    }
}
