//! Questions of tests about a pool.

use std::sync::Arc;

use super::StagingPool;
use crate::Result;

impl StagingPool {
    /// Makes a pool of exactly so many slots. [`StagingPool::new`] rounds up to whole huge pages.
    pub fn of_slots(slots: usize, slot_bytes: usize) -> Result<Arc<Self>> {
        let pool = Self::new(slots * slot_bytes, slot_bytes)?;
        let mut state = pool.shared.lock();
        state.free.truncate(slots);
        state.total = slots;
        drop(state);
        Ok(pool)
    }

    /// Returns the number of slots that nobody holds.
    pub fn free_slots(&self) -> usize {
        self.shared.lock().free.len()
    }
}
