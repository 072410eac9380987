//! The messages between the ranks of one save, beside the commit: the leaves that each rank has,
//! and that one rank does not take part.

use stepwell_core::format::manifest::Attempt;

use crate::commit::{Announcement, Vote};
use crate::coordination::team::Team;
use crate::error::{Error, Relayed, Result};
use crate::state::Census;

/// Exchanges the plain leaves of all ranks ([`crate::state::plain_leaves`]). A rank that cannot
/// save gives its error, and the call fails on all ranks.
pub(crate) fn exchange_leaves(team: &Team, mine: Result<Vec<u64>>) -> Result<Census> {
    let mine = mine.map(|leaves| (team.rank(), leaves));
    let census = |all: Vec<(u32, Vec<u64>)>| Ok(Census::new(&all).encoded());
    team.agree("save: the exchange of leaves", mine, census).map(Census::decoded)
}

/// Announces in the exchange of leaves that this rank does not save.
pub(crate) fn abstain_from_exchange(team: &Team, cause: &str) {
    let cause = cause.to_owned();
    let failure =
        if team.leads() { Error::RankFailed { rank: team.rank(), cause } } else { Error::Invalid(cause) };
    // The call returns this failure.
    drop(exchange_leaves(team, Err(failure)));
}

/// Announces to the other ranks that this one does not take part in the save with that number.
pub(crate) fn abstain(team: &Team, counter: u64, step: u64, cause: &str) {
    let rank = team.rank();
    let failure = Relayed::of(&Error::RankFailed { rank, cause: cause.to_owned() });
    let announced = if team.leads() {
        let announcement = Announcement::NotCommitted(failure);
        announcement.encode(false).and_then(|verdict| team.send_verdict(counter, &verdict, true))
    } else {
        let attempt = Attempt { session: team.session().to_owned(), counter };
        let vote = Vote::failed(rank, step, attempt, failure);
        vote.encode().and_then(|vote| team.send_vote(counter, &vote))
    };
    if let Err(error) = announced {
        tracing::warn!(step, %error, "reporting to the other ranks that this one does not save failed");
    }
}
