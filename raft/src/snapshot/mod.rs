//! Raft snapshots: virtual until one is sent.
//!
//! openraft is told of a snapshot after every flush cycle, but it is only a mark (log id and membership). Hard links are
//! taken when a follower needs one ([`builder`]), streamed as files with checksums ([`stream`]), received, verified and
//! installed ([`installer`]). The mark that is sent may be later than the one openraft asked for; never earlier.
//!
//! Invariants:
//! - links are removed when the transfer ended, well or not; removing them never changes what
//!   `get_current_snapshot` answers;
//! - what is received is used only after every file's size and checksum agreed and it was synced.
//!
//! Not here: what the files are (the state machine's business).

pub(crate) mod builder;
pub(crate) mod installer;
pub(crate) mod message;
pub(crate) mod stream;
