//! Messages of ranks: votes and announcements. A rank of another version, or a broken one, must not
//! crash the leader.

use stepwell_manager::commit::{Announcement, Vote};

use crate::sealed;

/// See the module documentation.
pub fn run(input: &[u8]) {
    let Some((is_vote, bytes)) = sealed(input) else { return };
    if !is_vote {
        if let Ok((announcement, stale)) = Announcement::decode(bytes) {
            let written = announcement.encode(stale).expect("what was read can be told");
            let (again, stale) = Announcement::decode(&written).expect("what was told can be read");
            assert_eq!(again.encode(stale).ok(), Some(written));
        }
        return;
    }
    // The indexes behind the head are sealed: what a rank that is wrong would send.
    let mut bytes = bytes.to_vec();
    if let Some(length) = bytes.first_chunk().map(|length| u64::from_le_bytes(*length) as usize)
        && let Some(index) = bytes.get_mut(8..).and_then(|rest| rest.get_mut(length..))
    {
        crate::seal::index(index, &[]);
    }
    if let Ok(vote) = Vote::decode(3, &bytes) {
        let written = vote.encode().expect("what was read can be told");
        assert_eq!(Vote::decode(3, &written).ok(), Some(vote));
    }
}
