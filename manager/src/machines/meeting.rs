//! The meeting of the machines: each tells what it has, and the leader takes the steps over.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::{Dir, EntryKind, Lock};
use stepwell_core::served::{Connections, ServedDir, Server, lengths_below};

use super::dir::{NamedAttempt, named_attempts};
use super::hand_over::{NewMain, demote};
use super::record::{self, MachineRecord, NewestState, newest_state};
use super::{Held, Hosting, Machines, MachinesDir, WriterRuns, copies, runs_of, writer_of};
use crate::control::{self, KnownRun, RootInfo};
use crate::coordination::LEADER;
use crate::coordination::team::Team;
use crate::directory_layout::{self, OwnName};
use crate::environment::Environment;
use crate::error::{Error, Result};
use crate::options::Options;
use crate::recovery;
use crate::root::Root;
use crate::step_name::StepName;

/// The report of a rank.
#[derive(Serialize, Deserialize)]
struct RankReport {
    /// The id of the root that it has opened. Empty: it has none.
    id: String,
    /// The root, for messages.
    path: String,
    /// The first rank of a machine reports for it.
    machine: Option<MachineReport>,
}

/// The report of a machine.
#[derive(Serialize, Deserialize)]
pub(super) struct MachineReport {
    record: MachineRecord,
    /// Its server. The leader's starts later.
    face: Option<Face>,
    /// Its steps and branches.
    pub(super) named: Vec<NamedAttempt>,
    /// Its copies and parts with the manifest of a step.
    pub(super) copied: Vec<NamedAttempt>,
    /// The writers whose files it has, for each attempt.
    files: Vec<HeldFiles>,
    /// The content of `root.json`, if it was the main machine once.
    info: Option<RootInfo>,
    /// The sessions that its tiers know.
    known_run: Option<KnownRun>,
}

/// The files of an attempt on the machine that reports.
#[derive(Serialize, Deserialize)]
struct HeldFiles {
    attempt: Attempt,
    writers: WriterRuns,
    /// The writers all of whose files are there, if it is a copy.
    whole: Option<WriterRuns>,
}

/// The server of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Face {
    addresses: Vec<String>,
    token: String,
    /// The root, for messages.
    path: String,
}

/// The message to all ranks.
#[derive(Serialize, Deserialize)]
struct Introduction {
    faces: BTreeMap<u32, Face>,
    /// For each attempt, the machines with its files.
    held: Vec<(Attempt, Held)>,
    sessions: BTreeSet<String>,
    /// The id of the main machine, as of these sessions.
    main: String,
    /// The id of the machine that leads.
    leader: String,
    /// The number of machines.
    machines: u32,
    /// Sessions of parts without a step.
    unnamed: BTreeSet<String>,
    /// The machines that have a copy or a part with a manifest.
    with_manifests: BTreeSet<u32>,
}

/// The machines, and the root that is on all of them.
pub(crate) type Met = (Arc<Machines>, Arc<dyn Dir>);

/// Introduces the machines to each other. All ranks make this call. `local` is the root on this
/// machine. `led` is the leader's.
pub(crate) fn meet(
    team: &Team,
    local: &Arc<dyn Dir>,
    led: Option<&mut Root>,
    options: &Options,
    environment: &Environment,
) -> Result<Met> {
    let own = machine_of(team, team.rank());
    let is_host = team.nodes().iter().position(|&machine| machine == own) == Some(team.rank() as usize);
    let mut lock = None;
    let owned = match &led {
        None if is_host => own_root(&**local, team.session(), options.take_over).map(|owned| lock = owned),
        _ => Ok(()),
    };
    let owned = owned.and_then(|()| {
        if is_host { Ok(record::read_or_make(&**local, environment).map(drop)?) } else { Ok(()) }
    });
    team.agree("own the machines", owned, |_| Ok(()))?;

    let names = led.as_ref().map(|root| &root.names);
    let mut server = None;
    let mut reported = || {
        let id = record::read(&**local)?.map(|record| record.id).unwrap_or_default();
        let path = place(local);
        if !is_host {
            return Ok(RankReport { id, path, machine: None });
        }
        if led.is_none() {
            server = Some(serve(local)?);
        }
        let machine = Some(report(local, names, server.as_ref().map(|(_, face)| face.clone()))?);
        Ok(RankReport { id, path, machine })
    };
    let mine = reported();
    let named = mine.as_ref().ok().and_then(|mine: &RankReport| Some(mine.machine.as_ref()?.named.clone()));
    let mut met: Option<Met> = None;
    let introduced_all = team.agree("meet the machines", mine, |reports| {
        let (introduction, of_leader) = lead(team, local, led, reports, options, environment)?;
        met = Some(of_leader);
        Ok(introduction)
    });
    let introduction =
        introduced_all.inspect_err(|_| met.iter().for_each(|(machines, _)| machines.stop()))?;
    let hosting = is_host.then(|| Hosting { server: server.map(|(server, _)| server), _lock: lock });
    let (machines, root) = met.unwrap_or_else(|| introduced(team, local, &introduction, hosting));
    let handed_over = if is_host && !machines.is_main() {
        hand_over(&**local, team.session(), named.as_deref().unwrap_or_default(), introduction, environment)
    } else {
        Ok(())
    };
    // Nobody goes on before all steps are where they belong.
    team.agree("hand over the steps", handed_over, |_| Ok(())).inspect_err(|_| machines.stop())?;
    Ok((machines, root))
}

fn machine_of(team: &Team, rank: u32) -> u32 {
    team.nodes().get(rank as usize).copied().unwrap_or_default()
}

/// Becomes the writer of the root of another machine than the main one.
fn own_root(local: &dyn Dir, session: &str, take_over: bool) -> Result<Option<Box<dyn Lock>>> {
    // The leader has taken its own root over.
    if control::read_epoch(local)?.is_some_and(|epoch| epoch.session == session) {
        return Err(shared(&local.path().display().to_string()));
    }
    control::make_control(local)?;
    control::lock(local, take_over)
}

/// The part of a machine that is not main: it retires what a killed process has left there, and
/// keeps its steps as parts.
fn hand_over(
    local: &dyn Dir,
    session: &str,
    named: &[NamedAttempt],
    all: Introduction,
    environment: &Environment,
) -> Result<()> {
    // `Leftovers` deletes the trash.
    recovery::sweep(local, session, environment)?;
    demote(local, named)?;
    let record = record::read_or_make(local, environment)?;
    let Introduction { sessions, main, machines, .. } = all;
    forget_copies(local, session, &sessions)?;
    Ok(record::write(
        local,
        &MachineRecord { id: record.id, sessions, main, machines, absent: BTreeSet::new() },
    )?)
}

/// Drops the manifests of the copies of a machine that was absent in a session: it may have missed
/// a rewind. `sessions` are those that all machines are about to record.
fn forget_copies(local: &dyn Dir, session: &str, sessions: &BTreeSet<String>) -> Result<()> {
    let known = record::read(local)?.unwrap_or_default().sessions;
    if sessions.iter().all(|other| other == session || known.contains(other)) {
        return Ok(());
    }
    for named in copies::with_manifest(local)? {
        copies::drop_manifest(local, &named.name)?;
    }
    Ok(())
}

fn shared(path: &str) -> Error {
    Error::Invalid(format!(
        "several machines share {path}, and a tier that is spread over machines needs a directory that each of them has for itself"
    ))
}

/// Starts the server of a root.
fn serve(root: &Arc<dyn Dir>) -> Result<(Server, Face)> {
    let failed = |error| stepwell_core::Error::io("make a token to serve", root.path(), error);
    let token = format!("{:032x}", stepwell_core::sys::random().map_err(failed)?);
    let server = Server::start(Arc::clone(root), token.clone())?;
    let face = Face { addresses: server.addresses().to_vec(), token, path: place(root) };
    Ok((server, face))
}

/// Returns the steps and branches of a root on one machine.
fn named(local: &dyn Dir, names: &StepName) -> Result<Vec<NamedAttempt>> {
    // An invalid directory stays where it is.
    let has_name = |name: &str| match directory_layout::parse(name) {
        Some(own) => matches!(own, OwnName::Branch { .. }),
        None => names.parse(name).is_some(),
    };
    Ok(named_attempts(local, &has_name)?)
}

fn report(local: &Arc<dyn Dir>, names: Option<&StepName>, face: Option<Face>) -> Result<MachineReport> {
    let info = control::read_info(&**local)?;
    let recorded = info.as_ref().map(|info| info.step_name.clone()).unwrap_or_default();
    let named = named(&**local, names.unwrap_or(&recorded))?;
    let copied = copies::with_manifest(&**local)?;
    let mut files = Vec::new();
    let mut add = |attempt: Attempt, name: &str, is_copy: bool| -> Result<()> {
        let dir = local.open_dir(name)?;
        let whole = if is_copy { Some(copies::whole_writers(&*dir)?) } else { None };
        files.push(HeldFiles { attempt, writers: writers_in(&dir)?, whole });
        Ok(())
    };
    for NamedAttempt { name, attempt, .. } in &named {
        add(attempt.clone(), name, false)?;
    }
    for entry in local.entries()?.into_iter().filter(|entry| entry.kind == EntryKind::Dir) {
        match directory_layout::parse(&entry.name) {
            Some(OwnName::Part { session, counter, .. }) => {
                add(Attempt { session, counter }, &entry.name, false)?;
            }
            Some(OwnName::Copy { session, counter, .. }) => {
                add(Attempt { session, counter }, &entry.name, true)?;
            }
            _ => {}
        }
    }
    let record = record::read(&**local)?.unwrap_or_default();
    let known_run = KnownRun::read(&**local)?;
    Ok(MachineReport { record, face, named, copied, files, info, known_run })
}

/// Describes a root on this machine, for messages.
fn place(local: &Arc<dyn Dir>) -> String {
    format!("{}:{}", stepwell_core::sys::host_name(), local.path().display())
}

/// Returns the writers whose files are in a step, as first and last of each run.
fn writers_in(step: &Arc<dyn Dir>) -> Result<WriterRuns> {
    let writers: BTreeSet<u32> = lengths_below(step)?.keys().filter_map(|path| writer_of(path)).collect();
    Ok(runs_of(&writers))
}

/// Checks that the ranks of a machine share a directory, and that no two machines do.
fn check_directories(team: &Team, reports: &[RankReport]) -> Result<()> {
    let mut machines: BTreeMap<&str, u32> = BTreeMap::new();
    let mut of_machines: BTreeMap<u32, &RankReport> = BTreeMap::new();
    for (rank, report) in (0..).zip(reports) {
        let machine = machine_of(team, rank);
        let first = of_machines.entry(machine).or_insert(report);
        if first.id != report.id {
            return Err(Error::Invalid(format!(
                "the processes of one machine have several directories: {} and, on rank {rank}, {}. They need one that they share. If these are two machines, give them two host names",
                first.path, report.path
            )));
        }
        if *machines.entry(&report.id).or_insert(machine) != machine {
            return Err(shared(&report.path));
        }
    }
    Ok(())
}

/// The leader's part: decides which steps the root has, and takes them over.
fn lead(
    team: &Team,
    local: &Arc<dyn Dir>,
    led: Option<&mut Root>,
    reports: Vec<RankReport>,
    options: &Options,
    environment: &Environment,
) -> Result<(Introduction, Met)> {
    check_directories(team, &reports)?;
    let own = machine_of(team, LEADER);
    let reports: BTreeMap<u32, MachineReport> = (0..)
        .zip(reports)
        .filter_map(|(rank, report)| Some((machine_of(team, rank), report.machine?)))
        .collect();
    let mut faces: BTreeMap<u32, Face> =
        reports.iter().filter_map(|(&machine, report)| Some((machine, report.face.clone()?))).collect();
    let others: BTreeMap<u32, Arc<ServedDir>> =
        faces.iter().map(|(&machine, face)| (machine, served(face))).collect();
    let records = reports.iter().map(|(&machine, report)| (machine, &report.record)).collect();
    let has_steps = |machine: u32| reports.get(&machine).is_some_and(|report| !report.named.is_empty());
    let newest = newest_state(own, &records, has_steps);
    let stand_ins = stand_ins(own, &newest, &reports);
    let NewestState { main: last, main_id, mut sessions } = newest;
    let source = last.or(stand_ins.first().copied());
    let mut led = led;
    if let Some(from) = source.filter(|&source| source != own).and_then(|source| reports.get(&source)) {
        if let (Some(root), Some(info)) = (&mut led, &from.info) {
            root.take_info_over(info, from.named.iter().map(NamedAttempt::step_name), options)?;
        }
        if let Some(known) = &from.known_run {
            known.write(&**local)?;
        }
    }
    if last.is_none() {
        tracing::warn!(
            stand_ins = stand_ins.len(),
            "the machine that led this run last is absent. Its steps are missing, except for those whose manifests another machine has"
        );
    }
    let names = &led.map_or_else(StepName::default, |root| root.names.clone());
    let new_main =
        NewMain { local, own, reports: &reports, others: &others, environment, names, stand_ins: &stand_ins };
    new_main.take_steps_over(last)?;

    let copied =
        stand_ins.iter().filter_map(|machine| reports.get(machine)).flat_map(|report| &report.copied);
    let named = reports.values().flat_map(|report| &report.named).chain(copied);
    let with_step: HashSet<&Attempt> = named.map(|named| &named.attempt).collect();
    let mut held = Vec::new();
    let mut unnamed = BTreeSet::new();
    for (&machine, report) in &reports {
        for HeldFiles { attempt, writers, whole } in &report.files {
            if with_step.contains(attempt) {
                let held_here = Held { machine, writers: writers.clone(), whole: whole.clone() };
                held.push((attempt.clone(), held_here));
            } else {
                unnamed.insert(attempt.session.clone());
            }
        }
    }
    let absent = match last.and_then(|last| reports.get(&last)) {
        Some(last) => last.record.absent.clone(),
        None => unnamed.clone(),
    };
    let id = reports.get(&own).map(|report| report.record.id.clone()).unwrap_or_default();
    let leader = id.clone();
    let mut main = main_id;
    if last.is_some() {
        sessions.insert(team.session().to_owned());
        main.clone_from(&leader);
    }
    let machines = u32::try_from(reports.len()).unwrap_or(u32::MAX);
    let record = MachineRecord { id, sessions: sessions.clone(), main: main.clone(), machines, absent };
    forget_copies(&**local, team.session(), &record.sessions)?;
    record::write(&**local, &record)?;

    // A machine that was main keeps the manifests.
    let keeps = |machine: u32, report: &MachineReport| machine != own && !report.named.is_empty();
    let named =
        reports.iter().filter(|&(&machine, report)| !report.copied.is_empty() || keeps(machine, report));
    let with_manifests = named.map(|(&machine, _)| machine).collect();
    let mut introduction = Introduction {
        faces: BTreeMap::new(),
        held,
        sessions,
        main,
        leader,
        machines,
        unnamed,
        with_manifests,
    };
    let machines = met_machines(team, local, &introduction, others, true);
    let root: Arc<dyn Dir> = Arc::new(MachinesDir::new(Arc::clone(&machines), Arc::clone(local)));
    let mut server = None;
    if !faces.is_empty() {
        // It shows the files of all machines.
        let (serving, face) = serve(&root)?;
        faces.insert(own, face);
        server = Some(serving);
    }
    *machines.hosting() = Some(Hosting { server, _lock: None });
    introduction.faces = faces;
    Ok((introduction, (machines, root)))
}

/// Returns the machines whose copies take the place of the last main machine, if that is absent:
/// the newest first. They were there in the last session, so they know of each rewind.
fn stand_ins(own: u32, newest: &NewestState, reports: &BTreeMap<u32, MachineReport>) -> Vec<u32> {
    if newest.main.is_some() {
        return Vec::new();
    }
    let is_current =
        |record: &MachineRecord| record.sessions == newest.sessions && record.main == newest.main_id;
    let current = reports.iter().filter(|(_, report)| is_current(&report.record));
    let newest_step = |report: &MachineReport| {
        let steps = report.named.iter().filter(|named| named.is_step()).chain(&report.copied);
        // Of two attempts of a session, the later one has replaced the other.
        steps.map(|named| (named.step, named.attempt.counter)).max()
    };
    let mut machines: Vec<((u64, u64), bool, u32)> = current
        .filter_map(|(&machine, report)| Some((newest_step(report)?, machine == own, machine)))
        .collect();
    machines.sort_unstable_by(|a, b| b.cmp(a));
    machines.into_iter().map(|(_, _, machine)| machine).collect()
}

fn served(Face { addresses, token, path }: &Face) -> Arc<ServedDir> {
    let client = Connections::new(PathBuf::from(path), addresses.clone(), token.clone());
    Arc::new(ServedDir::new(Arc::new(client)))
}

/// The view of a rank that does not lead.
fn introduced(team: &Team, local: &Arc<dyn Dir>, all: &Introduction, hosting: Option<Hosting>) -> Met {
    let own = machine_of(team, team.rank());
    let others: BTreeMap<u32, Arc<ServedDir>> = all
        .faces
        .iter()
        .filter(|(machine, _)| **machine != own)
        .map(|(&machine, face)| (machine, served(face)))
        .collect();
    let there = others.get(&machine_of(team, LEADER)).cloned();
    let machines = met_machines(team, local, all, others, hosting.is_some());
    *machines.hosting() = hosting;
    let there = there.map_or_else(|| Arc::clone(local), |there| there as Arc<dyn Dir>);
    let root: Arc<dyn Dir> = Arc::new(MachinesDir::new(Arc::clone(&machines), there));
    (machines, root)
}

fn met_machines(
    team: &Team,
    local: &Arc<dyn Dir>,
    all: &Introduction,
    others: BTreeMap<u32, Arc<ServedDir>>,
    is_host: bool,
) -> Arc<Machines> {
    let mut held: HashMap<Attempt, Vec<Held>> = HashMap::new();
    for (attempt, one) in &all.held {
        held.entry(attempt.clone()).or_default().push(one.clone());
    }
    Arc::new(Machines {
        own: machine_of(team, team.rank()),
        main: machine_of(team, LEADER),
        local: Arc::clone(local),
        others,
        of_ranks: team.nodes().into(),
        session: team.session().to_owned(),
        held,
        unnamed: all.unnamed.clone(),
        with_manifests: all.with_manifests.clone(),
        copied_manifests: Mutex::default(),
        lengths: Mutex::default(),
        is_host,
        is_recorded: Mutex::default(),
        main_id: all.leader.clone(),
        hosting: Mutex::default(),
    })
}
