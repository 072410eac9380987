//! Traces of the steps of a root: [`crate::traces`].

use super::Manager;
use crate::error::Result;
use crate::save::Streams;
use crate::state::{LeafSource, StateSource};
use crate::traces::{self, LeafDigest, StoredTrace};

impl Manager {
    /// Returns the session of this manager. All ranks have the same.
    pub fn session(&self) -> &str {
        self.inner.team.session()
    }

    /// Returns the digests of this rank's part of a state. `streams` are the caller's current
    /// streams of its devices.
    pub fn digests(&self, state: &StateSource, streams: &Streams) -> Result<Vec<LeafDigest>> {
        self.inner.check_usable()?;
        let pool = self.inner.pool();
        for leaf in &state.leaves {
            let LeafSource::Tensor { provider, .. } = leaf else { continue };
            for device in provider.devices() {
                self.prepare(0, &[device.ordinal()])?;
                if let Some(stream) = streams.get(&device.ordinal()) {
                    device.send_after(*stream)?;
                }
            }
        }
        traces::digests(state, &pool, self.inner.options.stall_timeout)
    }

    /// Adds a trace to a committed step.
    pub fn add_trace(&self, step: u64, json: String) -> Result<()> {
        self.inner.check_writable("add a trace")?;
        let found = self.inner.root.find(Some(step))?;
        traces::add(&*self.inner.root.dir, &found.manifest.attempt, json, &self.inner.environment)
    }

    /// Returns the traces of a step, in the order of their names.
    pub fn traces(&self, step: u64) -> Result<Vec<StoredTrace>> {
        self.inner.check_usable()?;
        let found = self.inner.root.find(Some(step))?;
        traces::read(&*self.inner.root.dir, Some(&found.manifest.attempt))
    }
}
