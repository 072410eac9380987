//! The machine by itself: events in, actions out.

use std::time::Duration;

use stepwell_core::format::index::Index;
use stepwell_core::format::manifest::{Attempt, Manifest, Others, UnsupportedLeaf};
use stepwell_core::io::Rename;

use super::vote::merge_votes;
use super::*;
use crate::error::{Error, Relayed};
use crate::state::Claim;

fn attempt(counter: u64) -> Attempt {
    Attempt { session: "0".repeat(32), counter }
}

fn plan(rank: u32, world_size: u32) -> CommitPlan {
    CommitPlan {
        step: 5,
        attempt: attempt(1),
        temporary: "tmp".into(),
        given_up: "given-up".into(),
        target: "step".into(),
        existing: Existing::Refuse,
        trash: "trash".into(),
        quarantine: "quarantine".into(),
        rank,
        world_size,
        nodes: [].into(),
        stall_timeout: Duration::from_secs(10),
        in_root: true,
        is_far: false,
        stale: false,
    }
}

fn item() -> DraftItem {
    DraftItem { dir: "i0".into(), name: ".".into(), top_level: vec![], undecided: vec![] }
}

fn machine(plan: CommitPlan) -> Machine {
    Machine::new(plan, Draft { step: 5, items: vec![item()], ..Draft::default() })
}

fn parts() -> Vec<ItemPart> {
    vec![ItemPart { item: item(), index: Index::default(), tensor_bytes: 0 }]
}

/// The failure of a rank, as it reports it.
fn relayed(rank: u32, cause: &str) -> Relayed {
    Relayed::of(&Error::RankFailed { rank, cause: cause.to_owned() })
}

/// The failure that the leader announces.
fn announced(action: &Action) -> &Relayed {
    match action {
        Action::Announce(Announcement::NotCommitted(failure)) => failure,
        other => panic!("{other:?}"),
    }
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
            Action::CheckWriter => Event::OtherWriter(None),
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
fn everything_is_synced_before_the_rename() {
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
            "CheckWriter",
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
fn the_attempt_decides_after_an_unclear_rename() {
    for (errno, target, committed) in [
        (5, TargetState::Committed(attempt(1)), true),
        (2, TargetState::Committed(attempt(1)), true),
        (17, TargetState::Committed(attempt(1)), true),
        (5, TargetState::Committed(attempt(7)), false),
        (17, TargetState::Committed(attempt(7)), false),
        (5, TargetState::Absent, false),
    ] {
        let mut machine = machine(plan(0, 1));
        to_rename(&mut machine);
        assert!(matches!(machine.on(io(errno), at(0)), Action::InspectTarget(name) if name == "step"));
        let next = machine.on(Event::TargetState(target.clone()), at(0));
        if committed {
            assert!(matches!(next, Action::SyncRoot));
        } else {
            assert!(matches!(next, Action::RemoveTemporary));
            let verdict = finished(machine.on(Event::Done, at(0)));
            let Verdict::NotCommitted(error) = verdict else { panic!("{verdict:?}") };
            let kind = if errno == 17 { "step_exists" } else { "save_failed" };
            assert_eq!(error.kind(), kind, "{errno} {target:?}");
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
fn what_is_no_step_is_durably_aside_before_its_name_is_taken() {
    for existing in [Existing::Refuse, Existing::Replace] {
        let mut machine = machine(CommitPlan { existing, ..plan(0, 1) });
        let mut action = machine.start();
        let mut there = true;
        let mut seen = Vec::new();
        let verdict = loop {
            let event = match &action {
                Action::WriteData => Event::Data(parts()),
                Action::CheckWriter => Event::OtherWriter(None),
                Action::InspectTarget(_) if there => {
                    Event::TargetState(TargetState::NotAStep("no manifest".into()))
                }
                Action::InspectTarget(_) => Event::TargetState(TargetState::Absent),
                Action::Rename { to, .. } if to == "step" && there => io(17),
                Action::Rename { to, .. } => {
                    there &= to != "quarantine";
                    seen.push(to.clone());
                    Event::Done
                }
                Action::SyncRoot => {
                    seen.push("sync".into());
                    Event::Done
                }
                Action::Finish(_) => break finished(action),
                _ => Event::Done,
            };
            action = machine.on(event, at(0));
        };
        assert!(matches!(verdict, Verdict::Committed { replaced: None }), "{verdict:?}");
        assert_eq!(seen, ["quarantine", "sync", "step", "sync"], "{existing:?}");
    }
}

#[test]
fn a_failed_set_aside_keeps_the_commit_from_its_name() {
    let mut machine = machine(plan(0, 1));
    to_rename(&mut machine);
    machine.on(io(17), at(0));
    assert!(matches!(
        machine.on(Event::TargetState(TargetState::NotAStep("no manifest".into())), at(0)),
        Action::Rename { to, .. } if to == "quarantine"
    ));
    assert!(matches!(machine.on(Event::Done, at(0)), Action::SyncRoot));
    assert!(matches!(machine.on(io(5), at(0)), Action::RemoveTemporary));
    assert!(matches!(finished(machine.on(Event::Done, at(0))), Verdict::NotCommitted(_)));
}

#[test]
fn a_replaced_step_is_swapped_then_made_durable_then_retired() {
    let mut machine = machine(CommitPlan { existing: Existing::Replace, ..plan(0, 1) });
    let mut action = machine.start();
    let renames = loop {
        let event = match &action {
            Action::WriteData => Event::Data(parts()),
            Action::CheckWriter => Event::OtherWriter(None),
            Action::InspectTarget(_) => Event::TargetState(TargetState::Committed(attempt(0))),
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
    let mut machine = machine(CommitPlan { existing: Existing::Replace, ..plan(0, 1) });
    let mut action = machine.start();
    while !matches!(action, Action::Rename { .. }) {
        let event = match &action {
            Action::WriteData => Event::Data(parts()),
            Action::CheckWriter => Event::OtherWriter(None),
            Action::InspectTarget(_) => Event::TargetState(TargetState::Committed(attempt(0))),
            _ => Event::Done,
        };
        action = machine.on(event, at(0));
    }
    assert!(matches!(machine.on(io(22), at(0)), Action::RemoveTemporary));
    assert!(matches!(finished(machine.on(Event::Done, at(0))), Verdict::NotCommitted(Error::Invalid(_))));
}

#[test]
fn a_failed_temporary_or_write_ends_the_save() {
    let mut machine_ = machine(plan(0, 1));
    machine_.start();
    assert!(matches!(machine_.on(io(28), at(0)), Action::RemoveTemporary));
    let mut machine_ = machine(plan(0, 1));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert!(matches!(machine_.on(io(28), at(0)), Action::RemoveTemporary));
}

fn votes(votes: Vec<Vote>) -> Event {
    Event::Votes(PolledVotes { votes, heartbeats: Vec::new() })
}

fn heartbeats(heartbeats: &[(u32, u64)]) -> Event {
    Event::Votes(PolledVotes { votes: Vec::new(), heartbeats: heartbeats.to_vec() })
}

fn asks_for(action: &Action) -> &[u32] {
    match action {
        Action::PollVotes { missing, .. } => missing,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_leader_waits_for_progress_and_names_the_stuck() {
    let vote = |rank, counter| Vote {
        rank,
        step: 5,
        attempt: attempt(counter),
        stale: false,
        claims: vec![],
        unsupported: vec![],
        parts: Ok(vec![]),
    };
    let mut machine_ = machine(plan(0, 4));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert_eq!(asks_for(&machine_.on(Event::Data(parts()), at(0))), [1, 2, 3]);
    // A straggler of a dead attempt is no progress.
    assert_eq!(asks_for(&machine_.on(votes(vec![vote(1, 0)]), at(9))), [1, 2, 3]);
    assert_eq!(asks_for(&machine_.on(votes(vec![vote(1, 1)]), at(9))), [2, 3]);
    assert_eq!(asks_for(&machine_.on(heartbeats(&[(2, 1), (3, 1)]), at(9))), [2, 3]);
    assert_eq!(asks_for(&machine_.on(heartbeats(&[(2, 1), (3, 2)]), at(18))), [2, 3]);
    let told = machine_.on(heartbeats(&[(2, 1), (3, 3)]), at(19));
    assert_eq!(announced(&told).missing, Some(vec![2]));
    assert!(matches!(machine_.on(Event::Done, at(19)), Action::RemoveTemporary));
    let verdict = finished(machine_.on(Event::Done, at(19)));
    let Verdict::NotCommitted(Error::CoordinationTimeout { missing, .. }) = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(missing, [2]);

    let mut machine_ = machine(plan(0, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    machine_.on(Event::Data(parts()), at(0));
    // Before anything is recorded, everybody's files are looked for: who gave up has taken his
    // away.
    assert!(matches!(machine_.on(votes(vec![vote(1, 1)]), at(1)), Action::FindFiles(_)));
    // It was the one that the others missed; it has missed none.
    let told = machine_.on(io(2), at(1));
    assert_eq!(announced(&told).missing, Some(vec![0]));
    machine_.on(Event::Done, at(1));
    let verdict = finished(machine_.on(Event::Done, at(1)));
    assert!(matches!(verdict, Verdict::NotCommitted(Error::GivenUpOn { step: 5, .. })), "{verdict:?}");
}

/// Six ranks, two on each of three nodes.
fn on_nodes(rank: u32) -> Machine {
    let mut machine = machine(CommitPlan { nodes: [0, 1, 0, 1, 2, 2].into(), ..plan(rank, 6) });
    machine.start();
    machine.on(Event::Done, at(0));
    machine
}

fn left_out(path: &str, reason: &str) -> UnsupportedLeaf {
    UnsupportedLeaf { path: path.into(), reason: reason.into(), others: Others::new() }
}

fn yes(rank: u32) -> Vote {
    Vote {
        rank,
        step: 5,
        attempt: attempt(1),
        stale: false,
        claims: vec![],
        unsupported: vec![],
        parts: Ok(parts()),
    }
}

#[test]
fn the_leader_hears_its_node_and_each_nodes_first_rank() {
    assert_eq!(asks_for(&on_nodes(0).on(Event::Data(parts()), at(0))), [1, 2, 4]);
    let Action::SendVote(vote) = on_nodes(5).on(Event::Data(parts()), at(0)) else { panic!() };
    assert_eq!(vote.rank, 5);
}

#[test]
fn the_first_rank_of_a_node_votes_for_all_of_it() {
    let mut machine_ = on_nodes(1);
    // Between two looks it asks whether the leader has decided without it.
    assert!(matches!(machine_.on(Event::Data(parts()), at(0)), Action::Listen { timeout: Duration::ZERO }));
    assert_eq!(asks_for(&machine_.on(silence(1), at(0))), [3]);
    let Action::SendVote(vote) = machine_.on(votes(vec![yes(3)]), at(1)) else { panic!() };
    assert_eq!((vote.rank, vote.parts.is_ok()), (1, true));

    let mut machine_ = on_nodes(1);
    machine_.on(Event::Data(parts()), at(0));
    let decided = Announcement::NotCommitted(relayed(4, "its disk is full"));
    let verdict = finished(
        machine_.on(Event::LeaderNews(LeaderNews { announcement: Some(decided), heartbeat: 0 }), at(0)),
    );
    let Verdict::NotCommitted(Error::Relayed(failure)) = verdict else { panic!("{verdict:?}") };
    assert_eq!(failure, relayed(4, "its disk is full"));
}

#[test]
fn what_goes_wrong_on_a_node_is_told_to_the_leader_as_it_is() {
    let failed = relayed(3, "its disk is full");
    let no = Vote { parts: Err(failed.clone()), ..yes(3) };
    let mut machine_ = on_nodes(1);
    machine_.on(Event::Data(parts()), at(0));
    machine_.on(silence(1), at(0));
    let Action::SendVote(vote) = machine_.on(votes(vec![no]), at(1)) else { panic!() };
    assert_eq!(vote.parts, Err(failed));

    let mut machine_ = on_nodes(1);
    machine_.on(Event::Data(parts()), at(0));
    machine_.on(silence(1), at(0));
    machine_.on(heartbeats(&[(3, 0)]), at(9));
    machine_.on(silence(1), at(9));
    let Action::SendVote(vote) = machine_.on(heartbeats(&[(3, 0)]), at(10)) else { panic!() };
    assert_eq!(vote.parts.clone().unwrap_err().missing, Some(vec![3]));
    // And it waits for the leader's word like everybody.
    assert!(matches!(machine_.on(Event::Done, at(10)), Action::Listen { .. }));

    let mut leader = on_nodes(0);
    leader.on(Event::Data(parts()), at(0));
    let told = leader.on(votes(vec![*vote]), at(11));
    assert_eq!(announced(&told).missing, Some(vec![3]));
}

#[test]
fn a_failing_rank_is_named_on_the_others() {
    let mut machine_ = machine(plan(0, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    machine_.on(Event::Data(parts()), at(0));
    let vote = Vote {
        rank: 1,
        step: 5,
        attempt: attempt(1),
        stale: false,
        claims: vec![],
        unsupported: vec![],
        parts: Err(relayed(1, "its disk is full")),
    };
    let told = machine_.on(votes(vec![vote]), at(0));
    assert_eq!(*announced(&told), relayed(1, "its disk is full"));
    assert!(matches!(machine_.on(Event::Done, at(0)), Action::RemoveTemporary));

    let mut machine_ = machine(plan(1, 2));
    machine_.start();
    machine_.on(Event::Done, at(0));
    assert!(matches!(machine_.on(io(28), at(0)), Action::SendVote(vote) if vote.parts.is_err()));
    let verdict = finished(machine_.on(Event::Done, at(0)));
    assert!(matches!(verdict, Verdict::NotCommitted(error) if error.errno() == Some(28)));
}

/// A rank that has voted and waits for the leader since second 0.
fn listening() -> Machine {
    let mut follower = machine(plan(1, 3));
    follower.start();
    follower.on(Event::Done, at(0));
    assert!(matches!(follower.on(Event::Data(parts()), at(0)), Action::SendVote(_)));
    assert!(matches!(follower.on(Event::Done, at(0)), Action::Listen { .. }));
    follower
}

fn silence(heartbeat: u64) -> Event {
    Event::LeaderNews(LeaderNews { announcement: None, heartbeat })
}

fn told(announcement: &Announcement) -> Verdict {
    let mut follower = listening();
    assert!(matches!(follower.on(silence(1), at(9)), Action::Listen { .. }));
    let (announcement, _) = Announcement::decode(&announcement.encode(false).unwrap()).unwrap();
    finished(
        follower.on(Event::LeaderNews(LeaderNews { announcement: Some(announcement), heartbeat: 0 }), at(9)),
    )
}

#[test]
fn every_rank_ends_with_the_verdict_of_the_leader_and_its_cause() {
    assert!(matches!(told(&Announcement::Committed), Verdict::Committed { replaced: None }));
    let verdict = told(&Announcement::NotCommitted(relayed(2, "its disk is full")));
    let Verdict::NotCommitted(error) = verdict else { panic!("{verdict:?}") };
    assert_eq!(error.kind(), "rank_failed");
    assert_eq!(error.to_string(), "rank 2 failed: its disk is full; so it has ended on all ranks");
    let error = Error::CoordinationTimeout { missing: vec![2], waited_for: "to vote".into(), seconds: 3.0 };
    let verdict = told(&Announcement::of(&Verdict::NotCommitted(error)));
    let Verdict::NotCommitted(error) = verdict else { panic!("{verdict:?}") };
    assert_eq!((error.kind(), error.missing()), ("coordination_timeout", Some(&[2][..])));
}

#[test]
fn an_unsynced_root_is_uncertain_on_every_rank() {
    let mut leader = machine(plan(0, 2));
    let mut action = leader.start();
    while !matches!(action, Action::SyncRoot) {
        let event = match action {
            Action::WriteData => Event::Data(parts()),
            Action::PollVotes { .. } => votes(vec![Vote {
                rank: 1,
                step: 5,
                attempt: attempt(1),
                stale: false,
                claims: vec![],
                unsupported: vec![],
                parts: Ok(vec![]),
            }]),
            Action::CheckWriter => Event::OtherWriter(None),
            _ => Event::Done,
        };
        action = leader.on(event, at(0));
    }
    let Action::Announce(announcement) = leader.on(io(5), at(0)) else { panic!() };
    assert!(matches!(finished(leader.on(Event::Done, at(0))), Verdict::Uncertain(_)));
    let verdict = told(&announcement);
    let Verdict::Uncertain(error) = verdict else { panic!("{verdict:?}") };
    assert_eq!(error.errno(), Some(5));
    // An error without an errno keeps its words.
    let verdict = told(&Announcement::Uncertain { cause: "the engine panicked".into(), errno: None });
    let Verdict::Uncertain(error) = verdict else { panic!("{verdict:?}") };
    assert!(error.to_string().contains("the engine panicked"), "{error}");
}

#[test]
fn a_rank_waits_for_a_living_leader_and_then_blocks_it() {
    let mut follower = listening();
    for (second, heartbeat) in [(9, 1), (18, 2), (27, 2)] {
        assert!(matches!(follower.on(silence(heartbeat), at(second)), Action::Listen { .. }), "{second}");
    }
    assert!(matches!(follower.on(silence(2), at(28)), Action::MarkGivenUp));
    assert!(
        matches!(follower.on(Event::Done, at(28)), Action::Rename { from, to, .. } if from == "tmp" && to == "trash")
    );
    let end = finished(follower.on(Event::Done, at(28)));
    assert!(
        matches!(end, Verdict::NotCommitted(Error::CoordinationTimeout { missing, .. }) if missing == [0])
    );
}

#[test]
fn a_committed_step_survives_a_silent_leader() {
    for (target, uncertain) in [
        (Event::TargetState(TargetState::Committed(attempt(1))), true),
        (Event::TargetState(TargetState::Committed(attempt(7))), false),
        (Event::TargetState(TargetState::NotAStep("no manifest".into())), false),
        (io(5), true),
    ] {
        let mut follower = listening();
        assert!(matches!(follower.on(silence(0), at(10)), Action::MarkGivenUp));
        assert!(matches!(follower.on(Event::Done, at(10)), Action::Rename { .. }));
        assert!(matches!(follower.on(io(2), at(10)), Action::InspectTarget(_)));
        let end = finished(follower.on(target, at(10)));
        assert_eq!(matches!(end, Verdict::Uncertain(_)), uncertain, "{end:?}");
    }
    // The same where the ranks cannot reach each other any more: the leader may have committed.
    let mut follower = listening();
    let gone = Event::Unreachable(Error::Unreachable("the store is gone".into()));
    assert!(matches!(follower.on(gone, at(1)), Action::MarkGivenUp));
    assert!(matches!(follower.on(Event::Done, at(1)), Action::Rename { to, .. } if to == "trash"));
    assert!(matches!(follower.on(io(2), at(1)), Action::InspectTarget(_)));
    let end = finished(follower.on(Event::TargetState(TargetState::Committed(attempt(1))), at(1)));
    assert!(matches!(end, Verdict::Uncertain(_)), "{end:?}");
    // The leader may still rename a directory that could not be moved aside.
    for said in [true, false] {
        let mut follower = listening();
        follower.on(silence(0), at(10));
        if said {
            follower.on(Event::Done, at(10));
        }
        assert!(matches!(finished(follower.on(io(5), at(10))), Verdict::Uncertain(_)));
    }
    // The swapped directory may be the old step by now.
    let mut follower = machine(CommitPlan { existing: Existing::Replace, ..plan(1, 2) });
    follower.start();
    follower.on(Event::Done, at(0));
    follower.on(Event::Data(parts()), at(0));
    follower.on(Event::Done, at(0));
    assert!(matches!(finished(follower.on(silence(0), at(10))), Verdict::Uncertain(_)));
}

#[test]
fn a_late_rank_leaves_a_given_up_save() {
    let mut late = machine(plan(1, 3));
    late.start();
    let Action::SendVote(vote) = late.on(Event::GivenUp, at(0)) else { panic!("it says so") };
    assert!(vote.parts.is_err());
    assert!(matches!(
        finished(late.on(Event::Done, at(0))),
        Verdict::NotCommitted(Error::GivenUpOn { step: 5, .. })
    ));
    let mut leader = machine(plan(0, 3));
    leader.start();
    assert_eq!(announced(&leader.on(Event::GivenUp, at(0))).missing, Some(vec![0]));
    assert!(matches!(leader.on(Event::Done, at(0)), Action::RemoveTemporary));
    assert!(matches!(
        finished(leader.on(Event::Done, at(0))),
        Verdict::NotCommitted(Error::GivenUpOn { step: 5, .. })
    ));
}

#[test]
fn a_vote_on_another_step_is_none_on_this_one() {
    let mut leader = machine(plan(0, 2));
    leader.start();
    leader.on(Event::Done, at(0));
    leader.on(Event::Data(parts()), at(0));
    let other = Vote { step: 6, ..yes(1) };
    let told = leader.on(votes(vec![other]), at(1));
    let failure = announced(&told);
    let text = failure.to_string();
    assert_eq!(failure.rank, Some(1));
    assert!(text.contains("step 6") && text.contains("step 5"), "{text}");
}

#[test]
fn a_difference_within_a_node_is_refused() {
    let vote =
        |rank, value| Vote { claims: vec![Claim { rank, path: 7, part: 7, kind: 1, value }], ..yes(rank) };
    let draft = Draft { step: 5, items: vec![item()], ..Draft::default() };
    let refusal = |odd: u32| {
        let node = |first: u32| {
            let votes = [first, first + 1].map(|rank| vote(rank, if rank == odd { 9 } else { 1 }));
            let told = merge_votes(&draft, &attempt(1), first, votes.into()).encode().unwrap();
            Vote::decode(first, &told).unwrap()
        };
        records::records(&draft, &attempt(1), 4, vec![node(0), node(2)], 0).err()
    };
    assert!(refusal(4).is_none(), "all say the same");
    for odd in 0..4 {
        let named = format!("ranks 0 and {} have different values", odd.max(1));
        assert!(refusal(odd).is_some_and(|error| error.to_string().contains(&named)), "{named}");
    }
}

#[test]
fn the_manifest_has_what_any_rank_left_out() {
    let draft = Draft { step: 5, items: vec![item()], ..Draft::default() };
    let node = |first: u32| {
        let votes = [first, first + 1].map(|rank| Vote {
            unsupported: vec![
                left_out("hook", &format!("of rank {rank}")),
                left_out(&rank.to_string(), "odd"),
            ],
            ..yes(rank)
        });
        let told = merge_votes(&draft, &attempt(1), first, votes.into()).encode().unwrap();
        Vote::decode(first, &told).unwrap()
    };
    let (_, written) = records::records(&draft, &attempt(1), 4, vec![node(0), node(2)], 0).unwrap();
    let (_, record) = written.last().unwrap();
    let manifest = Manifest::decode(&record.bytes, &draft.root).unwrap();
    let expected = ["hook", "0", "1", "2", "3"];
    assert_eq!(manifest.unsupported.iter().map(|leaf| &leaf.path).collect::<Vec<_>>(), expected);
    assert_eq!(manifest.unsupported[0], left_out("hook", "of rank 0"));
}

#[test]
fn a_vote_survives_its_journey() {
    let claims = vec![Claim { rank: 2, path: u64::MAX, part: 1, kind: u32::MAX, value: 3 }];
    let vote = Vote { claims, unsupported: vec![left_out("a/b", "a function")], ..yes(3) };
    assert_eq!(Vote::decode(3, &vote.encode().unwrap()).unwrap(), vote);
    let vote = Vote {
        rank: 3,
        step: 5,
        attempt: attempt(1),
        stale: false,
        claims: vec![],
        unsupported: vec![],
        parts: Err(relayed(3, "no")),
    };
    assert_eq!(Vote::decode(3, &vote.encode().unwrap()).unwrap(), vote);
    for bad in [&b""[..], &[255; 9], &[0; 8]] {
        assert_eq!(Vote::decode(3, bad).unwrap_err().kind(), "rank_failed");
    }
}
