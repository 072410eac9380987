//! [`SimDisk`]: the handle of one process on a simulated file system, and the levers that tests
//! pull.

use std::fmt;
use std::path::{Component, Path};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::ROOT;
use super::context::{Context, Hook, Moment, SharedDisk, failed};
use super::faults::{Fault, OperationKind};
use super::handles::SimDir;
use super::image::{Image, ImageNode};
use super::inodes::{Inode, Inodes};
use super::log::Log;
use super::queue::SimQueue;
use super::world::World;
use crate::Result;
use crate::io::{Dir, Disk, EngineChoice, Queue};

/// One process's view of a simulated file system. Clones are the same process.
#[derive(Clone)]
pub struct SimDisk {
    pub(super) context: Arc<Context>,
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

    /// `kill -9` of this process: its later calls answer `KILLED`, its locks are free, its
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
