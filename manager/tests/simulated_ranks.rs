//! Ranks and their leader, simulated: any order of their actions, messages that are lost, late or
//! doubled, ranks that are paused or killed at any action, a second job that takes the root over.
//! One seed is one history; a seed that fails is printed, and `STEPWELL_SEED` runs it alone.
//!
//! The invariants of every history, once it is over:
//!
//! * a step that is visible is whole: all ranks' files of one attempt, and the manifest that lists
//!   them;
//! * a rank that was told "committed" finds the step, and one that was told "not committed" finds
//!   none of that attempt, whatever others do later;
//! * each rank that lives has its answer, in bounded time.

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "tests end by them")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::TestRng;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
    Within,
};
use stepwell_core::format::manifest::{Attempt, Others, TopLevel};
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::io::{Dir, Disk, File, LockKind, Section, Transfer};
use stepwell_core::leaf_path::Component;
use stepwell_core::region::Region;
use stepwell_core::sys::Buffer;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_manager::commit::{
    Announcement, Commit, CommitPlan, Draft, DraftItem, Existing, ItemPart, LeaderNews, Machine, Verdict,
    Vote,
};
use stepwell_manager::commit::{PolledVotes, World};
use stepwell_manager::coordination::SingleProcess;
use stepwell_manager::coordination::team::RankHeartbeat;
use stepwell_manager::discovery::{damage, read_manifest};
use stepwell_manager::{Clock, Environment, directory_layout, recovery, root};

const STALL: Duration = Duration::from_secs(10);
/// After this time nothing goes wrong any more. Every wait must then end by itself, not because a
/// process is killed.
const TROUBLE: Duration = Duration::from_secs(60);
/// Bytes of a rank's data file: room for what every file begins and ends with.
const FILE_BYTES: usize = 3 * 4096;
const STEPS: u64 = 3;

/// Numbers that are the same for the same seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    /// Once in so many times.
    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// The time of one history.
#[derive(Default)]
struct SimClock(AtomicU64);

impl Clock for SimClock {
    fn unix_ns(&self) -> i64 {
        self.0.load(Ordering::Relaxed) as i64
    }

    fn monotonic(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

/// Messages under way: when they arrive, and what they are.
#[derive(Default)]
struct Net {
    messages: BTreeMap<String, (Duration, Vec<u8>)>,
    heartbeats: BTreeMap<u32, RankHeartbeat>,
    /// Ranks, and the saves on which they have voted.
    voted: BTreeSet<(u32, u64)>,
}

/// One rank of a job.
struct Rank {
    job: usize,
    number: u32,
    process: SimDisk,
    root: Arc<dyn Dir>,
    /// The save that it is at.
    save: u64,
    commit: Option<Commit>,
    /// When it does its next action; `None`: it is over, or dead.
    next: Option<Duration>,
    verdicts: Vec<(u64, Verdict)>,
    killed: bool,
}

/// The state that all ranks of a job share.
struct Job {
    session: String,
    ranks: u32,
    /// For each rank its node.
    nodes: Arc<[u32]>,
    /// True if the ranks of a node write into one file.
    node_files: bool,
    /// The ranks that write, in order; all others have nothing of their own.
    writers: Vec<u32>,
    net: Net,
}

struct SimWorld<'a> {
    job: &'a mut Job,
    dice: &'a mut Dice,
    now: Duration,
    disk: SimDisk,
    root: Arc<dyn Dir>,
    rank: u32,
    save: u64,
    trouble: bool,
    /// How long the action that was asked for takes.
    took: Duration,
}

fn byte_of(session: &str, save: u64, rank: u32) -> u8 {
    let sum: u64 = session.bytes().map(u64::from).sum();
    (sum.wrapping_mul(31) ^ (save * 7 + u64::from(rank))) as u8
}

fn item() -> DraftItem {
    let entry = TopLevel { name: "w".into(), position: 0, others: Others::new() };
    DraftItem { dir: "i0".into(), name: ".".into(), top_level: vec![entry], undecided: vec![] }
}

fn index(rank: u32, writers: &[u32], file_id: u128) -> Index {
    let mut tree = Tree::new();
    let top = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(top), Some(Component::Key("w".into())));
    let place = writers.iter().position(|&writer| writer == rank).unwrap() as u64;
    let region = Region { offset: [place].as_slice().into(), extent: [1].as_slice().into() };
    let extent = Extent { source: Source::Own(0), offset: 4096, length: 1, integrity: Integrity::BlockCrc };
    let chunk = ChunkRecord { region: ChunkRegion::Box(region), extent, codec: Codec::Raw };
    let tensor = TensorRecord {
        dtype: Dtype::Uint8,
        shape: [writers.len() as u64].as_slice().into(),
        chunks: [chunk].into_iter().collect(),
    };
    let file = FileRecord {
        name: format!("{rank:05}.data").into(),
        length: FILE_BYTES as u64,
        file_id,
        trailer_crc: rank,
        within: None,
    };
    Index { tree, leaves: vec![LeafRecord::Tensor(tensor)], files: vec![file] }
}

impl SimWorld<'_> {
    /// When a message arrives; `None`: never.
    fn journey(&mut self) -> Option<Duration> {
        if self.trouble && self.dice.once_in(25) {
            return None;
        }
        let late = if self.trouble && self.dice.once_in(10) { 25_000 } else { 200 };
        Some(self.now + Duration::from_millis(self.dice.below(late)))
    }

    fn put(&mut self, key: String, message: Vec<u8>) {
        if let Some(arrives) = self.journey() {
            self.job.net.messages.insert(key, (arrives, message));
        }
    }

    fn get(&self, key: &str) -> Option<Vec<u8>> {
        let (arrives, message) = self.job.net.messages.get(key)?;
        (*arrives <= self.now).then(|| message.clone())
    }

    fn heartbeat(&mut self) {
        let heartbeat = self.job.net.heartbeats.entry(self.rank).or_default();
        let voted = self.job.net.voted.contains(&(self.rank, self.save));
        heartbeat.save = self.save + u64::from(voted);
        heartbeat.progress += 1;
    }

    /// A rank's last heartbeat, if it still has to report on this save.
    fn heartbeat_in_save(&self, rank: u32) -> Option<u64> {
        self.job.net.heartbeats.get(&rank).copied().unwrap_or_default().in_save(self.save)
    }

    fn unreachable(&mut self) -> bool {
        self.trouble && self.dice.once_in(400)
    }
}

impl World for SimWorld<'_> {
    fn write_data(&mut self, temporary: &Arc<dyn Dir>) -> stepwell_core::Result<Vec<ItemPart>> {
        self.heartbeat();
        if self.trouble && self.dice.once_in(30) {
            return Err(stepwell_core::Error::io("write", "/data", std::io::Error::from_raw_os_error(28)));
        }
        if !self.job.writers.contains(&self.rank) {
            return Ok(Vec::new());
        }
        let dir = match temporary.create_dir("i0") {
            Err(error) if error.already_exists() => temporary.open_dir("i0")?,
            made => made?,
        };
        let byte = byte_of(&self.job.session, self.save, self.rank);
        let mut index = index(self.rank, &self.job.writers, u128::from(byte) + 1);
        if self.job.node_files {
            let name = format!("n{:05}.data", self.job.nodes[self.rank as usize]);
            let lock = dir.try_lock(&name, LockKind::Exclusive, true)?;
            let (file, offset) = dir.extend_file(&name, FILE_BYTES as u64)?;
            drop(lock);
            let part: Arc<dyn File> = Arc::new(Section::new(file, offset, FILE_BYTES as u64));
            let mut buffer = Buffer::alone(FILE_BYTES)?;
            buffer.get_mut(..FILE_BYTES).unwrap().fill(byte);
            let mut queue = self.disk.queue(1)?;
            queue.submit(Transfer::Write, &part, 0, FILE_BYTES, buffer, 0);
            while let Some(completion) = queue.complete(Duration::ZERO) {
                completion.result?;
            }
            part.sync()?;
            index.files[0].within = Some(Within { name: name.into(), offset, stream: None });
        } else {
            dir.write_file(&format!("{:05}.data", self.rank), &vec![byte; FILE_BYTES])?;
        }
        Ok(vec![ItemPart { item: item(), index, tensor_bytes: 1 }])
    }

    fn reclaim_space(&mut self) -> bool {
        false
    }

    fn other_writer(&mut self) -> stepwell_core::Result<Option<String>> {
        root::other_writer(&*self.root, &self.job.session)
    }

    fn send_vote(&mut self, vote: &Vote) -> stepwell_manager::Result<()> {
        self.job.net.voted.insert((self.rank, self.save));
        if self.unreachable() {
            return Err(stepwell_manager::Error::Unreachable("the board is gone".into()));
        }
        let message = vote.encode()?;
        self.put(format!("vote/{}/{}", self.save, self.rank), message);
        Ok(())
    }

    fn poll_votes(&mut self, missing: &[u32], timeout: Duration) -> stepwell_manager::Result<PolledVotes> {
        self.heartbeat();
        self.took = timeout;
        if self.unreachable() {
            return Err(stepwell_manager::Error::Unreachable("the board is gone".into()));
        }
        let found: Vec<(u32, Vec<u8>)> = missing
            .iter()
            .filter_map(|&rank| Some((rank, self.get(&format!("vote/{}/{rank}", self.save))?)))
            .collect();
        let votes: Vec<Vote> =
            found.iter().map(|(rank, message)| Vote::decode(*rank, message)).collect::<Result<_, _>>()?;
        let heartbeats =
            missing.iter().filter_map(|&rank| Some((rank, self.heartbeat_in_save(rank)?))).collect();
        Ok(PolledVotes { votes, heartbeats })
    }

    fn announce(&mut self, announcement: &Announcement) -> stepwell_manager::Result<()> {
        self.put(format!("verdict/{}", self.save), announcement.encode(false)?);
        Ok(())
    }

    fn listen(&mut self, timeout: Duration) -> stepwell_manager::Result<LeaderNews> {
        self.heartbeat();
        self.took = timeout;
        if self.unreachable() {
            return Err(stepwell_manager::Error::Unreachable("the board is gone".into()));
        }
        let announcement = match self.get(&format!("verdict/{}", self.save)) {
            Some(message) => Some(Announcement::decode(&message)?.0),
            None => None,
        };
        Ok(LeaderNews { announcement, heartbeat: self.heartbeat_in_save(0).unwrap_or_default() })
    }
}

struct History {
    disk: SimDisk,
    clock: Arc<SimClock>,
    rng: Arc<TestRng>,
    jobs: Vec<Job>,
    ranks: Vec<Rank>,
    dice: Dice,
    chaos: bool,
    /// As long as anything may go wrong.
    trouble: bool,
    /// The views of all ranks, for a seed that fails.
    log: Vec<String>,
}

impl History {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let disk = SimDisk::new();
        let rng = Arc::new(TestRng::default());
        let ranks = 1 + dice.below(6) as u32;
        let chaos = !dice.once_in(8);
        let mut history = Self {
            disk,
            clock: Arc::default(),
            rng,
            jobs: Vec::new(),
            ranks: Vec::new(),
            dice,
            chaos,
            trouble: chaos,
            log: Vec::new(),
        };
        history.begin(ranks, Duration::ZERO);
        if history.chaos && history.dice.once_in(3) {
            // A second job comes, which takes the first one for dead.
            let ranks = 1 + history.dice.below(3) as u32;
            let at = Duration::from_millis(history.dice.below(20_000));
            history.begin(ranks, at);
        }
        history
    }

    fn environment(&self, disk: &SimDisk) -> Environment {
        Environment {
            disk: Arc::new(disk.clone()),
            clock: self.clock.clone(),
            rng: self.rng.clone(),
            coordinator: Arc::new(SingleProcess),
            staging: None,
        }
    }

    fn begin(&mut self, ranks: u32, at: Duration) {
        let number = self.jobs.len();
        let session = format!("{:032x}", u128::from(self.dice.next()) | 1 << 100);
        // Neighbours are on one node, or every other rank is.
        let (nodes, neighbours) = (1 + self.dice.below(3) as u32, self.dice.once_in(2));
        let node = |rank: u32| if neighbours { rank / nodes } else { rank % nodes };
        let nodes = (0..ranks).map(node).collect();
        let node_files = self.dice.once_in(8);
        let all = self.dice.once_in(2);
        let mut writers: Vec<u32> = (0..ranks).filter(|_| all || self.dice.once_in(2)).collect();
        if writers.is_empty() {
            writers.push(self.dice.below(u64::from(ranks)) as u32);
        }
        self.jobs.push(Job { session, ranks, nodes, node_files, writers, net: Net::default() });
        for rank in 0..ranks {
            let process = self.disk.process();
            let root = process.create_dir_all(Path::new(common::ROOT)).unwrap();
            let next = Some(at + Duration::from_millis(self.dice.below(100)));
            self.ranks.push(Rank {
                job: number,
                number: rank,
                process,
                root,
                save: 0,
                commit: None,
                next,
                verdicts: Vec::new(),
                killed: false,
            });
        }
    }

    /// Does the action that is next in time; `false`: nothing is left.
    fn advance(&mut self) -> bool {
        let due = self.ranks.iter().enumerate().filter_map(|(at, rank)| Some((rank.next?, at))).min();
        let Some((now, at)) = due else { return false };
        self.clock.0.store(now.as_nanos() as u64, Ordering::Relaxed);
        if now >= TROUBLE {
            self.trouble = false;
        }
        if self.trouble && self.dice.once_in(300) {
            let rank = &mut self.ranks[at];
            self.log.push(format!("{now:?} job {} rank {} is killed", rank.job, rank.number));
            rank.process.kill();
            rank.killed = true;
            rank.next = None;
            rank.commit = None;
            return true;
        }
        if self.ranks[at].commit.is_none() {
            self.open_or_plan(at);
        }
        let mut commit = self.ranks[at].commit.take().unwrap();
        let rank = &self.ranks[at];
        let (job, save, number, root) = (rank.job, rank.save, rank.number, Arc::clone(&rank.root));
        let disk = rank.process.clone();
        let mut world = SimWorld {
            job: &mut self.jobs[job],
            dice: &mut self.dice,
            now,
            disk,
            root: Arc::clone(&root),
            rank: number,
            save,
            trouble: self.trouble,
            took: Duration::ZERO,
        };
        let verdict = commit.step(&root, &*self.clock, &mut world);
        let took = world.took + self.pause();
        let rank = &mut self.ranks[at];
        rank.next = Some(now + took);
        match verdict {
            None => rank.commit = Some(commit),
            Some(verdict) => {
                self.log.push(format!("{now:?} job {job} rank {number} save {save}: {verdict:?}"));
                rank.verdicts.push((save, verdict));
                rank.save += 1;
                if rank.save == STEPS {
                    rank.next = None;
                }
            }
        }
        true
    }

    /// The time until a rank's next action: usually short, sometimes longer than every timeout.
    fn pause(&mut self) -> Duration {
        let longest = if self.trouble && self.dice.once_in(60) { 40_000 } else { 30 };
        Duration::from_millis(self.dice.below(longest))
    }

    /// Has a rank at its next save; the leader's first one takes the root.
    fn open_or_plan(&mut self, at: usize) {
        let rank = &self.ranks[at];
        let job = &self.jobs[rank.job];
        if rank.save == 0 && rank.number == 0 {
            let environment = self.environment(&rank.process);
            root::make_control(&*rank.root).unwrap();
            root::take_epoch(&*rank.root, &job.session).unwrap();
            // The epoch's last owner counts as dead, as far as this job knows.
            let _ = recovery::sweep(&*rank.root, &job.session, &environment);
        }
        let (save, session) = (rank.save, job.session.clone());
        let target = format!("step_{:08}", save + 10);
        let plan = CommitPlan {
            step: save + 10,
            attempt: Attempt { session: session.clone(), counter: save },
            temporary: directory_layout::temporary(&directory_layout::label(save + 10), &session, save),
            given_up: directory_layout::given_up(&directory_layout::label(save + 10), &session, save),
            trash: directory_layout::trash("5", u128::from(self.dice.next())),
            quarantine: directory_layout::quarantine(&target, u128::from(self.dice.next())),
            target,
            existing: Existing::Refuse,
            rank: rank.number,
            world_size: job.ranks,
            nodes: job.nodes.clone(),
            stall_timeout: STALL,
            in_root: true,
            is_far: false,
            stale: false,
        };
        let draft = Draft {
            root: common::ROOT.into(),
            step: save + 10,
            plan_hash: "0".repeat(32),
            items: vec![item()],
            ..Draft::default()
        };
        self.ranks[at].commit = Some(Commit::begin(Machine::new(plan, draft)));
    }

    fn check(&self) {
        let reader = self.disk.process();
        let root = reader.open_dir(Path::new(common::ROOT)).unwrap();
        let mut visible: BTreeMap<u64, Attempt> = BTreeMap::new();
        for entry in root.entries().unwrap() {
            let Some(number) = entry.name.strip_prefix("step_") else { continue };
            let step: u64 = number.parse().unwrap();
            let manifest = read_manifest(&*root, &entry.name)
                .unwrap_or_else(|error| panic!("{} has no manifest that holds: {error}", entry.name));
            assert_eq!(manifest.step, step);
            assert_eq!(damage(&*root, &entry.name, &manifest).unwrap(), None, "{}", entry.name);
            let job = self.jobs.iter().find(|job| job.session == manifest.attempt.session).unwrap();
            assert_eq!(manifest.files.len(), job.writers.len());
            for &rank in &job.writers {
                let file =
                    manifest.files.iter().find(|file| file.path == format!("i0/{rank:05}.data")).unwrap();
                let (path, offset) = match &file.within {
                    Some(within) => (&within.path, within.offset),
                    None => (&file.path, 0),
                };
                let stored = root.open_file(&format!("{}/{path}", entry.name)).unwrap();
                let bytes = stored.read_at(offset, FILE_BYTES).unwrap();
                assert_eq!(bytes.len(), FILE_BYTES);
                let byte = byte_of(&job.session, manifest.attempt.counter, rank);
                assert!(
                    bytes.iter().all(|&found| found == byte),
                    "{} holds bytes of another attempt",
                    entry.name
                );
            }
            visible.insert(step, manifest.attempt.clone());
        }
        let mut committed = BTreeSet::new();
        for rank in &self.ranks {
            let session = &self.jobs[rank.job].session;
            if !rank.killed {
                assert_eq!(
                    rank.verdicts.len() as u64,
                    STEPS,
                    "job {} rank {} has its answers",
                    rank.job,
                    rank.number
                );
            }
            for (save, verdict) in &rank.verdicts {
                let own = Attempt { session: session.clone(), counter: *save };
                let is_there = visible.get(&(save + 10)) == Some(&own);
                match verdict {
                    Verdict::Committed { .. } => {
                        assert!(
                            is_there,
                            "job {} rank {}: step {} is committed and not there",
                            rank.job,
                            rank.number,
                            save + 10
                        );
                        committed.insert((save + 10, session.clone()));
                    }
                    Verdict::NotCommitted(error) => {
                        assert!(
                            !is_there,
                            "job {} rank {}: step {} is there, and was not committed: {error}",
                            rank.job,
                            rank.number,
                            save + 10
                        );
                    }
                    Verdict::Uncertain(_) => {}
                }
            }
        }
        let steps: BTreeSet<u64> = committed.iter().map(|(step, _)| *step).collect();
        assert_eq!(steps.len(), committed.len(), "two jobs have committed one step");
        if !self.chaos {
            assert_eq!(visible.len() as u64, STEPS, "without trouble everything is committed");
        }
    }
}

fn run(seed: u64) {
    let outcome = std::panic::catch_unwind(|| {
        let mut history = History::new(seed);
        let mut actions = 0;
        while history.advance() {
            actions += 1;
            assert!(actions < 20_000, "it does not come to an end:\n{}", history.log.join("\n"));
        }
        if let Err(failure) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| history.check())) {
            eprintln!("{}", history.log.join("\n"));
            std::panic::resume_unwind(failure);
        }
    });
    if let Err(failure) = outcome {
        eprintln!("STEPWELL_SEED={seed}");
        std::panic::resume_unwind(failure);
    }
}

#[test]
fn no_history_of_ranks_breaks_a_promise_or_hangs() {
    if let Ok(seed) = std::env::var("STEPWELL_SEED") {
        return run(seed.parse().unwrap());
    }
    let seeds: u64 = if std::env::var_os("STEPWELL_LONG").is_some() { 1_000_000 } else { 10_000 };
    let next = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(move || {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= seeds {
                            return;
                        }
                        run(seed);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}
