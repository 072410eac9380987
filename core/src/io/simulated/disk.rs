//! [`SimDisk`]: the handle of one process on a simulated file system, and the levers that tests
//! pull.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::path::{Component, Path};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::faults::{Action, Fault, OperationKind};
use super::handles::SimDir;
use super::image::{Image, ImageNode};
use super::inodes::{Inode, Inodes};
use super::log::Log;
use super::queue::SimQueue;
use super::world::{Answer, World};
use super::{KILLED, ROOT};
use crate::io::{Dir, Disk, EngineChoice, Queue};
use crate::{Error, Result};

/// One process's view of a simulated file system. Clones are the same process.
#[derive(Clone)]
pub struct SimDisk {
    pub(super) context: Arc<Context>,
}

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
    /// Which process, in order of [`SimDisk::process`] calls; the first is 0.
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
    shared: Arc<SharedDisk>,
    pub(super) process: usize,
    pub(super) choice: EngineChoice,
    order_seed: u64,
    pub(super) locks: bool,
}

struct SharedDisk {
    world: Mutex<World>,
    hook: Mutex<Option<Hook>>,
}

thread_local! {
    static IN_HOOK: Cell<bool> = const { Cell::new(false) };
}

impl Default for SimDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SimDisk(process {})\n{}", self.context.process, self.image())
    }
}

impl SimDisk {
    /// An empty file system.
    pub fn new() -> Self {
        Self::on(Inodes::empty())
    }

    /// A file system that holds this, durably, as a machine finds it that has just come up.
    pub fn from_image(image: &Image) -> Self {
        Self::on(Inodes::of(image))
    }

    fn on(inodes: Inodes) -> Self {
        let mut world = World::new(inodes);
        let process = world.add_process();
        let shared = Arc::new(SharedDisk { world: Mutex::new(world), hook: Mutex::new(None) });
        Self { context: Arc::new(Context { shared, process, choice: choice(1), order_seed: 0, locks: true }) }
    }

    /// This process, with transfers that need this alignment of offset and length (misuse
    /// otherwise), as with O_DIRECT. For a fresh disk: handles that were opened before keep the old
    /// one.
    #[must_use]
    pub fn with_alignment(self, alignment: usize) -> Self {
        self.rebuilt(|context| context.choice = choice(alignment))
    }

    /// This process, whose queues complete their transfers in an order drawn from `seed`; 0 is the
    /// order of submission.
    #[must_use]
    pub fn with_order(self, seed: u64) -> Self {
        self.rebuilt(|context| context.order_seed = seed)
    }

    /// This process, on a file system without locks: every try answers ENOLCK. For a fresh disk,
    /// and inherited by [`SimDisk::process`].
    #[must_use]
    pub fn without_locks(self) -> Self {
        self.rebuilt(|context| context.locks = false)
    }

    fn rebuilt(self, change: impl FnOnce(&mut Context)) -> Self {
        let old = &self.context;
        let mut context = Context {
            shared: Arc::clone(&old.shared),
            process: old.process,
            choice: old.choice.clone(),
            order_seed: old.order_seed,
            locks: old.locks,
        };
        change(&mut context);
        Self { context: Arc::new(context) }
    }

    /// The same file system, for another process: own count of operations, own faults, own life.
    #[must_use]
    pub fn process(&self) -> Self {
        let process = self.world().add_process();
        self.clone().rebuilt(|context| context.process = process)
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.context.world()
    }

    // Death.

    /// `kill -9` of this process: its later calls answer [`KILLED`], its locks are free, its
    /// effects stay.
    pub fn kill(&self) {
        self.world().kill(self.context.process);
    }

    /// Kills this process instead of its operation number `number` (from 0).
    pub fn kill_at(&self, number: u64) {
        if let Ok(process) = self.world().process(self.context.process) {
            process.stop_at = Some(number);
        }
    }

    /// True if this process was killed.
    pub fn is_killed(&self) -> bool {
        self.world().is_killed(self.context.process)
    }

    // Faults.

    /// Operations of this process so far.
    pub fn operations(&self) -> u64 {
        self.world().process(self.context.process).map_or(0, |process| process.operations)
    }

    /// Adds a rule for this process. The first rule that hits decides.
    pub fn inject(&self, fault: Fault) {
        if let Ok(process) = self.world().process(self.context.process) {
            process.faults.add(fault);
        }
    }

    /// Drops all rules of this process.
    pub fn clear_faults(&self) {
        if let Ok(process) = self.world().process(self.context.process) {
            process.faults.clear();
        }
    }

    /// Limits the file system to this many bytes (whole pages per file, one per directory); `None`
    /// is no limit. More than is free answers ENOSPC.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.world().capacity = bytes;
    }

    /// Called around every operation of every process from now on.
    pub fn set_hook(&self, hook: Option<Hook>) {
        *self.context.shared.hook.lock().unwrap_or_else(PoisonError::into_inner) = hook;
    }

    /// Holds every write of every process until the answer is set to false.
    pub fn hold_writes(&self) -> Arc<AtomicBool> {
        let held = Arc::new(AtomicBool::new(true));
        let hook = Arc::clone(&held);
        self.set_hook(Some(Arc::new(move |moment, operation| {
            while moment == Moment::Before
                && operation.kind == OperationKind::Write
                && hook.load(Ordering::SeqCst)
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        })));
        held
    }

    // The log.

    /// Notes something in the order of effects, such as `committed 3`. Dead processes acknowledge
    /// nothing.
    pub fn mark(&self, label: &str) {
        let mut world = self.world();
        if !world.is_killed(self.context.process) {
            world.mark(label);
        }
    }

    /// The operations since the file system was created or last settled.
    pub fn log(&self) -> Log {
        self.world().log.clone()
    }

    /// Declares everything durable as it stands, and begins a new log: for the preparation of a
    /// scenario.
    pub fn settle(&self) {
        let mut world = self.world();
        world.log = Log { base: world.inodes.clone(), records: Vec::new() };
    }

    // Inspection.

    /// The current content with all effects, durable or not, as a newly started process sees it.
    pub fn image(&self) -> Image {
        self.world().inodes.image()
    }

    /// The bytes of a file, by `/`-separated path; counts no operation.
    pub fn bytes(&self, path: &str) -> Option<Arc<Vec<u8>>> {
        let world = self.world();
        let ino = world.find_file(ROOT, path.trim_start_matches('/')).ok()?;
        world.bytes(ino).ok().cloned()
    }

    /// Changes the bytes of a file behind everybody's back (bit rot); `false` where there is no
    /// such file. Not logged: settle first, or enumerate nothing after.
    pub fn corrupt(&self, path: &str, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut world = self.world();
        let Ok(ino) = world.find_file(ROOT, path.trim_start_matches('/')) else { return false };
        match world.inodes.get_mut(ino) {
            Some(Inode::File(bytes)) => {
                change(Arc::make_mut(bytes));
                true
            }
            _ => false,
        }
    }

    /// Puts a tree under a path whose parent exists, durably and without a log entry (a copied,
    /// foreign or hostile directory); replaces what is there.
    pub fn plant(&self, path: &str, node: &Arc<ImageNode>) -> Result<()> {
        let mut world = self.world();
        let path = path.trim_start_matches('/');
        let (dir, name) =
            world.resolve(ROOT, path).map_err(|errno| failed("plant", Path::new(path), errno))?;
        let mut inodes = world.inodes.clone();
        let ino = inodes.plant(node);
        if let Some(Inode::Dir(entries)) = inodes.get_mut(dir) {
            entries.insert(Arc::from(name), ino);
        }
        // A new table starts a new log, with everything in it durable.
        world.replant(inodes);
        Ok(())
    }

    /// Handles (directories, files, locks) that are open, of all processes.
    pub fn open_handles(&self) -> u64 {
        self.world().open_handles()
    }

    /// Locks that this process holds.
    pub fn locks_held(&self) -> usize {
        self.world().locks_held(self.context.process)
    }
}

impl Disk for SimDisk {
    fn choice(&self) -> &EngineChoice {
        &self.context.choice
    }

    fn open_dir(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        let below = below_root(path)?;
        self.context.perform(OperationKind::OpenDir, "open", path, |world| {
            let ino = if below.is_empty() { ROOT } else { world.find_dir(ROOT, &below)? };
            Ok(SimDir::new(&self.context, world, ino, path) as Arc<dyn Dir>)
        })
    }

    fn create_dir_all(&self, path: &Path) -> Result<Arc<dyn Dir>> {
        let below = below_root(path)?;
        let mut at = self.context.perform(OperationKind::OpenDir, "open", Path::new("/"), |world| {
            Ok(SimDir::new(&self.context, world, ROOT, Path::new("/")) as Arc<dyn Dir>)
        })?;
        // As on a real disk: the deepest directory that is there may have been made by somebody who
        // was killed before syncing it.
        let mut above: Option<Arc<dyn Dir>> = None;
        for name in below.split('/').filter(|name| !name.is_empty()) {
            let parent = Arc::clone(&at);
            at = match at.open_dir(name) {
                Err(error) if error.is_not_found() => match at.create_dir(name) {
                    Err(error) if error.errno() == Some(libc::EEXIST) => at.open_dir(name)?,
                    made => {
                        let made = made?;
                        if let Some(above) = above.take() {
                            above.sync()?;
                        }
                        at.sync()?;
                        made
                    }
                },
                opened => {
                    above = Some(parent);
                    opened?
                }
            };
        }
        if let Some(above) = above {
            above.sync()?;
        }
        Ok(at)
    }

    fn queue(&self, depth: usize) -> Result<Box<dyn Queue>> {
        Ok(Box::new(SimQueue::new(Arc::clone(&self.context), depth, self.context.order_seed)))
    }
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

fn choice(alignment: usize) -> EngineChoice {
    EngineChoice {
        engine: "simulated",
        direct: alignment > 1,
        alignment,
        registered: false,
        reasons: vec!["a simulated file system was asked for".into()],
    }
}

/// A path as `/`-separated components below the root; relative paths start at the root too.
fn below_root(path: &Path) -> Result<String> {
    let mut parts = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(part) => match part.to_str() {
                Some(part) => parts.push(part),
                None => return Err(failed("open", path, libc::EINVAL)),
            },
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => return Err(failed("open", path, libc::EXDEV)),
        }
    }
    Ok(parts.join("/"))
}
