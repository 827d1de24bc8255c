//! Raft snapshots: virtual until one is sent.
//!
//! openraft is told of a snapshot after every flush cycle, but it is only a mark (log id and membership). Hard links are
//! taken when a follower needs one and shared by all who do ([`builder`]), streamed as files with checksums ([`stream`]),
//! received, verified and installed ([`installer`], [`incoming`], [`chunk_map`]). The mark that is sent may be later than the
//! one openraft asked for; never earlier. A transfer that breaks off is gone on with by the next attempt, also when either
//! side was restarted meanwhile.
//!
//! Invariants:
//! - links are removed when nobody has needed them for a while, parts when nobody goes on with them ([`keeper`]); removing
//!   either never changes that `get_current_snapshot` answers;
//! - what is received is used only after every file's size and checksum agreed and it was synced.
//!
//! Not here: what the files are (the state machine's business).

pub(crate) mod builder;
pub(crate) mod chunk_map;
pub(crate) mod incoming;
pub(crate) mod installer;
pub(crate) mod keeper;
pub(crate) mod message;
pub(crate) mod progress;
pub(crate) mod stream;
#[cfg(test)]
mod tests;
pub(crate) mod traffic;
