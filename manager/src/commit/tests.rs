//! The machine by itself: events in, actions out.

use std::time::Duration;

use stepwell_core::format::index::Index;
use stepwell_core::format::manifest::Attempt;
use stepwell_core::io::Rename;

use super::records::DraftItem;
use super::*;
use crate::error::Error;

fn attempt(counter: u64) -> Attempt {
    Attempt { session: "0".repeat(32), counter }
}

fn plan(rank: u32, world_size: u32) -> Plan {
    Plan {
        step: 5,
        attempt: attempt(1),
        temporary: "tmp".into(),
        target: "step".into(),
        existing: Existing::Refuse,
        trash: "trash".into(),
        quarantine: "quarantine".into(),
        rank,
        world_size,
        stall_timeout: Duration::from_secs(10),
        fenced: true,
    }
}

fn machine(plan: Plan) -> Machine {
    let item = DraftItem { dir: "i0".into(), name: ".".into(), top_level: vec![] };
    Machine::new(plan, Draft { step: 5, items: vec![item], ..Draft::default() })
}

fn parts() -> Vec<ItemPart> {
    vec![ItemPart { dir: "i0".into(), index: Index::default(), tensor_bytes: 0 }]
}

fn io(errno: i32) -> Event {
    Event::Failed(stepwell_core::Error::io("do", "/x", std::io::Error::from_raw_os_error(errno)))
}

fn at(seconds: u64) -> Now {
    Now { monotonic: Duration::from_secs(seconds), unix_ns: 0 }
}

/// Drives a machine up to its rename; gives the names of the actions on the way.
fn to_rename(machine: &mut Machine) -> Vec<String> {
    let mut seen = Vec::new();
    let mut action = machine.start();
    loop {
        seen.push(match &action {
            Action::WriteFile { path, .. } => format!("write {path}"),
            Action::SyncDir(path) => format!("sync {path}"),
            other => format!("{other:?}").split([' ', '(']).next().unwrap_or_default().to_owned(),
        });
        let event = match action {
            Action::WriteData => Event::Data(parts()),
            Action::CheckFence => Event::Fence(None),
            Action::Rename { .. } => return seen,
            Action::Finish(verdict) => panic!("{verdict:?} after {seen:?}"),
            _ => Event::Done,
        };
        action = machine.on(event, at(0));
    }
}

fn finished(action: Action) -> Verdict {
    match action {
        Action::Finish(verdict) => *verdict,
        other => panic!("{other:?}"),
    }
}

#[test]
fn everything_below_the_name_is_written_and_synced_before_the_rename() {
    let mut machine = machine(plan(0, 1));
    assert_eq!(
        to_rename(&mut machine),
        [
            "CreateTemporary",
            "WriteData",
            "write i0/index",
            "sync i0",
            "write .lease",
            "write manifest.json",
            "sync ",
            "CheckFence",
            "Rename",
        ]
    );
    assert!(matches!(machine.on(Event::Done, at(0)), Action::SyncRoot));
    assert!(matches!(finished(machine.on(Event::Done, at(0))), Verdict::Committed { replaced: None }));
}

#[test]
fn a_failed_sync_of_the_root_is_uncertain_and_never_tried_again() {
    let mut machine = machine(plan(0, 1));
    to_rename(&mut machine);
    machine.on(Event::Done, at(0));
    assert!(matches!(finished(machine.on(io(5), at(0))), Verdict::Uncertain(_)));
}

#[test]
fn whose_attempt_stands_there_decides_after_a_rename_that_did_not_say_yes() {
    for (errno, stands, committed) in [
        (5, Stands::Step(attempt(1)), true),
        (2, Stands::Step(attempt(1)), true),
        (17, Stands::Step(attempt(1)), true),
        (5, Stands::Step(attempt(7)), false),
        (17, Stands::Step(attempt(7)), false),
        (5, Stands::Nothing, false),
    ] {
        let mut machine = machine(plan(0, 1));
        to_rename(&mut machine);
        assert!(matches!(machine.on(io(errno), at(0)), Action::Look(name) if name == "step"));
        let next = machine.on(Event::Stands(stands.clone()), at(0));
        if committed {
            assert!(matches!(next, Action::SyncRoot));
        } else {
            assert!(matches!(next, Action::RemoveTemporary));
            let verdict = finished(machine.on(Event::Done, at(0)));
            let Verdict::NotCommitted(error) = verdict else { panic!("{verdict:?}") };
            let kind = if errno == 17 { "step_exists" } else { "save_failed" };
            assert_eq!(error.kind(), kind, "{errno} {stands:?}");
        }
    }
}

#[test]
fn where_nothing_can_be_learnt_nothing_is_touched() {
    let mut machine = machine(plan(0, 1));
    to_rename(&mut machine);
    machine.on(io(5), at(0));
    assert!(matches!(finished(machine.on(io(5), at(0))), Verdict::Uncertain(_)));
}

#[test]
fn a_replaced_step_is_swapped_then_made_durable_then_retired() {
    let mut machine = machine(Plan { existing: Existing::Replace, ..plan(0, 1) });
    let mut action = machine.start();
    let renames = loop {
        let event = match &action {
            Action::WriteData => Event::Data(parts()),
            Action::CheckFence => Event::Fence(None),
            Action::Look(_) => Event::Stands(Stands::Step(attempt(0))),
            Action::Rename { how, .. } => break *how,
            _ => Event::Done,
        };
        action = machine.on(event, at(0));
    };
    assert_eq!(renames, Rename::Exchange);
    assert!(matches!(machine.on(Event::Done, at(0)), Action::SyncRoot));
    let Action::Rename { from, to, .. } = machine.on(Event::Done, at(0)) else { panic!() };
    assert_eq!((from.as_str(), to.as_str()), ("tmp", "trash"));
    assert!(matches!(machine.on(Event::Done, at(0)), Action::SyncRoot));
    let verdict = finished(machine.on(Event::Done, at(0)));
    assert!(matches!(verdict, Verdict::Committed { replaced: Some(trash) } if trash == "trash"));
}

#[test]
fn where_two_names_cannot_be_swapped_replacing_is_refused() {
    let mut machine = machine(Plan { existing: Existing::Replace, ..plan(0, 1) });
    let mut action = machine.start();
    while !matches!(action, Action::Rename { .. }) {
        let event = match &action {
            Action::WriteData => Event::Data(parts()),
            Action::CheckFence => Event::Fence(None),
            Action::Look(_) => Event::Stands(Stands::Step(attempt(0))),
            _ => Event::Done,
        };
        action = machine.on(event, at(0));
    }
    assert!(matches!(machine.on(io(22), at(0)), Action::RemoveTemporary));
    assert!(matches!(finished(machine.on(Event::Done, at(0))), Verdict::NotCommitted(Error::Invalid(_))));
}

#[test]
fn making_the_temporary_is_tried_once_more_after_the_trash_was_emptied_and_writing_never() {
    let mut machine_ = machine(plan(0, 1));
    machine_.start();
    assert!(matches!(machine_.on(io(28), at(0)), Action::EmptyTrash));
    assert!(matches!(machine_.on(Event::Done, at(0)), Action::CreateTemporary));
    assert!(matches!(machine_.on(io(28), at(0)), Action::RemoveTemporary));
    let mut machine_ = machine(plan(0, 1));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert!(matches!(machine_.on(io(28), at(0)), Action::RemoveTemporary));
}

#[test]
fn the_leader_waits_for_all_votes_as_long_as_there_is_progress_and_names_who_is_missing() {
    let vote = |rank, counter| Vote { rank, attempt: attempt(counter), parts: Ok(vec![]) };
    let mut machine_ = machine(plan(0, 3));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert!(matches!(machine_.on(Event::Data(parts()), at(0)), Action::PollVotes { have: 1, .. }));
    // A straggler of a dead attempt is no progress.
    assert!(matches!(machine_.on(Event::Votes(vec![vote(1, 0)]), at(9)), Action::PollVotes { have: 1, .. }));
    assert!(matches!(machine_.on(Event::Votes(vec![vote(1, 1)]), at(9)), Action::PollVotes { have: 2, .. }));
    assert!(matches!(machine_.on(Event::Votes(vec![]), at(18)), Action::PollVotes { .. }));
    assert!(matches!(machine_.on(Event::Votes(vec![]), at(19)), Action::RemoveTemporary));
    let Action::SendVerdict(false, _) = machine_.on(Event::Done, at(19)) else { panic!() };
    let verdict = finished(machine_.on(Event::Done, at(19)));
    let Verdict::NotCommitted(Error::CoordinationTimeout { missing, .. }) = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(missing, [2]);

    let mut machine_ = machine(plan(0, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    machine_.on(Event::Data(parts()), at(0));
    assert!(matches!(machine_.on(Event::Votes(vec![vote(1, 1)]), at(1)), Action::WriteFile { .. }));
}

#[test]
fn a_rank_that_fails_is_named_on_the_others_and_keeps_its_own_error() {
    let mut machine_ = machine(plan(0, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    machine_.on(Event::Data(parts()), at(0));
    let vote = Vote { rank: 1, attempt: attempt(1), parts: Err("its disk is full".into()) };
    assert!(matches!(machine_.on(Event::Votes(vec![vote]), at(0)), Action::RemoveTemporary));
    assert!(
        matches!(machine_.on(Event::Done, at(0)), Action::SendVerdict(false, message) if message.contains("rank 1"))
    );

    let mut machine_ = machine(plan(1, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert!(matches!(machine_.on(io(28), at(0)), Action::SendVote(vote) if vote.parts.is_err()));
    let verdict = finished(machine_.on(Event::Done, at(0)));
    assert!(matches!(verdict, Verdict::NotCommitted(error) if error.errno() == Some(28)));
}

#[test]
fn a_follower_believes_the_leader_and_gives_up_by_its_deadline() {
    for (verdict, committed) in [(Some((true, String::new())), true), (Some((false, "no".into())), false)] {
        let mut machine_ = machine(plan(1, 2));
        machine_.start();
        machine_.on(Event::Done, at(0));
        assert!(matches!(machine_.on(Event::Data(parts()), at(0)), Action::SendVote(_)));
        assert!(matches!(machine_.on(Event::Done, at(0)), Action::PollVerdict { .. }));
        assert!(matches!(machine_.on(Event::Verdict(None), at(9)), Action::PollVerdict { .. }));
        let end = finished(machine_.on(Event::Verdict(verdict), at(9)));
        assert_eq!(matches!(end, Verdict::Committed { .. }), committed);
    }
    let mut machine_ = machine(plan(1, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    machine_.on(Event::Data(parts()), at(0));
    machine_.on(Event::Done, at(0));
    let end = finished(machine_.on(Event::Verdict(None), at(10)));
    assert!(
        matches!(end, Verdict::NotCommitted(Error::CoordinationTimeout { missing, .. }) if missing == [0])
    );
}

#[test]
fn a_vote_survives_its_journey() {
    let vote = Vote { rank: 3, attempt: attempt(1), parts: Ok(parts()) };
    assert_eq!(Vote::decode(3, &vote.encode().unwrap()).unwrap(), vote);
    let vote = Vote { rank: 3, attempt: attempt(1), parts: Err("no".into()) };
    assert_eq!(Vote::decode(3, &vote.encode().unwrap()).unwrap(), vote);
    for bad in [&b""[..], &[255; 9], &[0; 8]] {
        assert_eq!(Vote::decode(3, bad).unwrap_err().kind(), "rank_failed");
    }
}
