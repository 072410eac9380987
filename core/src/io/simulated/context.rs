//! The state of a simulated disk that all handles of one process share.

use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::KILLED;
use super::faults::{Action, OperationKind};
use super::world::{Answer, World};
use crate::io::EngineChoice;
use crate::{Error, Result};

/// When a hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Counted, but not done yet. A kill or a fault that the hook brings about comes in time for
    /// later operations; a kill for this one too.
    Before,
    /// A listing has begun, and has read none of its names yet: what takes a name after the last
    /// one that stood there is missed by it, as is what loses its name now.
    Amid,
    /// Done, whether it succeeded or failed.
    After,
}

/// The operation that a hook is told about.
#[derive(Clone, Debug)]
pub struct Operation<'a> {
    /// Which process, in order of [`super::SimDisk::process`] calls; the first is 0.
    pub process: usize,
    /// The number of this operation in its process, from 0.
    pub number: u64,
    /// The kind of operation.
    pub kind: OperationKind,
    /// Its subject, as the caller knows it.
    pub path: &'a Path,
}

/// Called around every operation of every process, without any lock held: it may use the disk (its
/// own operations call no hook).
pub type Hook = Arc<dyn Fn(Moment, &Operation<'_>) + Send + Sync>;

/// The state that all handles of one process share.
pub(super) struct Context {
    pub(super) shared: Arc<SharedDisk>,
    pub(super) process: usize,
    pub(super) choice: EngineChoice,
    pub(super) order_seed: u64,
    pub(super) locks: bool,
}

pub(super) struct SharedDisk {
    pub(super) world: Mutex<World>,
    pub(super) hook: Mutex<Option<Hook>>,
}

thread_local! {
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
}

impl Context {
    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        // A panic of a test thread says nothing of the state: each operation is one step under the
        // lock.
        self.shared.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One operation: counted, hooked, failed where a rule says so, done.
    pub(super) fn perform<T>(
        &self,
        kind: OperationKind,
        verb: &'static str,
        path: &Path,
        act: impl FnOnce(&mut World) -> Answer<T>,
    ) -> Result<T> {
        // A handle that nobody gets is dropped after the mutex is free: its drop takes it.
        let mut lost = None;
        self.perform_with(kind, verb, path, |world, action| match action {
            Some(Action::Fail(errno) | Action::FailHalfway(errno)) => Err(errno),
            Some(Action::FailAfterwards(errno)) => {
                lost = Some(act(world)?);
                Err(errno)
            }
            Some(Action::Short | Action::Stall) | None => act(world),
        })
    }

    /// As [`Context::perform`], where the operation itself knows what a fault does to it.
    pub(super) fn perform_with<T>(
        &self,
        kind: OperationKind,
        verb: &'static str,
        path: &Path,
        act: impl FnOnce(&mut World, Option<Action>) -> Answer<T>,
    ) -> Result<T> {
        let entered = self.world().enter(self.process, kind, &path.to_string_lossy());
        let (number, action) = entered.map_err(|errno| failed(verb, path, errno))?;
        let operation = Operation { process: self.process, number, kind, path };
        self.call_hook(Moment::Before, &operation);
        let answer = {
            let mut world = self.world();
            if world.is_killed(self.process) { Err(KILLED) } else { act(&mut world, action) }
        };
        self.call_hook(Moment::After, &operation);
        answer.map_err(|errno| failed(verb, path, errno))
    }

    /// As [`Context::perform`], in two steps with the hook in between.
    pub(super) fn perform_amid<A, T>(
        &self,
        kind: OperationKind,
        verb: &'static str,
        path: &Path,
        first: impl FnOnce(&mut World) -> Answer<A>,
        rest: impl FnOnce(&mut World, A) -> Answer<T>,
    ) -> Result<T> {
        let entered = self.world().enter(self.process, kind, &path.to_string_lossy());
        let (number, action) = entered.map_err(|errno| failed(verb, path, errno))?;
        let operation = Operation { process: self.process, number, kind, path };
        let alive = |world: &World| if world.is_killed(self.process) { Err(KILLED) } else { Ok(()) };
        self.call_hook(Moment::Before, &operation);
        let begun = {
            let mut world = self.world();
            alive(&world).and_then(|()| match action {
                Some(Action::Fail(errno) | Action::FailHalfway(errno) | Action::FailAfterwards(errno)) => {
                    Err(errno)
                }
                Some(Action::Short | Action::Stall) | None => first(&mut world),
            })
        };
        let answer = begun.and_then(|begun| {
            self.call_hook(Moment::Amid, &operation);
            let mut world = self.world();
            alive(&world)?;
            rest(&mut world, begun)
        });
        self.call_hook(Moment::After, &operation);
        answer.map_err(|errno| failed(verb, path, errno))
    }

    fn call_hook(&self, moment: Moment, operation: &Operation<'_>) {
        if IN_HOOK.get() {
            return;
        }
        let hook = self.shared.hook.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(hook) = hook {
            IN_HOOK.set(true);
            hook(moment, operation);
            IN_HOOK.set(false);
        }
    }
}

pub(super) fn failed(verb: &'static str, path: &Path, errno: i32) -> Error {
    Error::io(verb, path, io::Error::from_raw_os_error(errno))
}
