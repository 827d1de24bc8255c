//! What an error that answers a push means for its message: a pure function of the answer and of what was sent.
//!
//! A refusal of content does not say whether it came from the door (its number is not used up) or from the log (it is), and
//! another copy of the message may be under way. So a refused message is emptied: its number is sent with an empty body, and
//! the answer to *that* settles it. An answer is therefore judged by the body it answers, never by what the message is now.
//!
//! | answer            | to content                        | to content, emptied since | to the empty body              |
//! |-------------------|-----------------------------------|---------------------------|--------------------------------|
//! | applied           | applied                           | applied                   | applied: the content, earlier  |
//! | WITHDRAWN         | unknown (nobody took it back)     | refused                   | refused                        |
//! | FORGOTTEN         | unknown                           | unknown                   | unknown                        |
//! | a refusal         | empty it                          | nothing                   | refused: the log's own record  |
//! | not here, not now | again                             | again                     | again                          |
//! | CORRUPT           | again, some times; then empty it  | nothing                   | again, some times; then end    |
//! | INTERNAL and such | empty it                          | nothing                   | again, some times; then end    |
//! | SESSION_EXPIRED   | end of the session                | the same                  | the same                       |

use evershard_proto::v1::{ErrorDetail, ErrorKind};

use crate::error::is_passing;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Everything unacknowledged is sent again.
    Again,
    /// The same, a bounded number of times.
    Failed,
    /// The content is refused: use its number up with an empty body.
    Empty,
    /// Refused, for certain; the number is used up.
    Refused,
    /// Nobody knows any more; the number is used up, so the session goes on.
    Unknown,
    /// What is on its way will tell.
    Ignore,
    /// The servers do not know the session any more.
    SessionExpired,
    /// The servers expect a number that was acknowledged before this was sent: they have lost what they promised.
    SessionLost,
}

/// What was sent, and what the message is now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// The attempt that is answered carried the empty body.
    pub(super) empty: bool,
    /// The message is emptied by now.
    pub(super) emptied: bool,
    /// The lowest number that was unacknowledged when the attempt was sent. An answer may be old: what is unacknowledged
    /// *now* says nothing about it.
    pub(super) first_unacked: u64,
}

impl Verdict {
    pub(super) fn of(detail: &ErrorDetail, sent: Sent) -> Verdict {
        match detail.kind() {
            ErrorKind::SessionExpired => Verdict::SessionExpired,
            // 0 is no number: a server that does not say what it expects.
            ErrorKind::OutOfOrder if (1..sent.first_unacked).contains(&detail.expected_seq) => {
                Verdict::SessionLost
            }
            ErrorKind::Forgotten => Verdict::Unknown,
            ErrorKind::Withdrawn if sent.emptied => Verdict::Refused,
            ErrorKind::Withdrawn => Verdict::Unknown,
            // An empty body has no keys: this is the record of the content.
            ErrorKind::WrongRange if sent.empty => Verdict::Refused,
            kind if is_passing(kind) => Verdict::Again,
            _ if sent.emptied && !sent.empty => Verdict::Ignore,
            ErrorKind::Corrupt => Verdict::Failed,
            ErrorKind::Internal | ErrorKind::Unspecified | ErrorKind::WrongCluster if sent.empty => {
                Verdict::Failed
            }
            _ if sent.empty => Verdict::Refused,
            _ => Verdict::Empty,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENT: Sent = Sent { empty: false, emptied: false, first_unacked: 5 };
    const LATE_CONTENT: Sent = Sent { emptied: true, ..CONTENT };
    const EMPTY: Sent = Sent { empty: true, ..LATE_CONTENT };

    fn verdicts(kind: ErrorKind, expected_seq: u64) -> [Verdict; 3] {
        let detail = ErrorDetail { kind: kind as i32, expected_seq, ..Default::default() };
        [CONTENT, LATE_CONTENT, EMPTY].map(|sent| Verdict::of(&detail, sent))
    }

    #[test]
    fn the_table_above_holds() {
        use Verdict::{Again, Empty, Failed, Ignore, Refused, SessionExpired, SessionLost, Unknown};
        let cases = [
            (ErrorKind::Withdrawn, 0, [Unknown, Refused, Refused]),
            (ErrorKind::Forgotten, 0, [Unknown, Unknown, Unknown]),
            (ErrorKind::UnknownTable, 0, [Empty, Ignore, Refused]),
            (ErrorKind::Invalid, 0, [Empty, Ignore, Refused]),
            (ErrorKind::WrongRange, 0, [Again, Again, Refused]),
            (ErrorKind::NotLeader, 0, [Again, Again, Again]),
            (ErrorKind::Exhausted, 0, [Again, Again, Again]),
            (ErrorKind::Corrupt, 0, [Failed, Ignore, Failed]),
            (ErrorKind::Internal, 0, [Empty, Ignore, Failed]),
            (ErrorKind::SessionExpired, 0, [SessionExpired, SessionExpired, SessionExpired]),
            (ErrorKind::OutOfOrder, 0, [Again, Again, Again]),
            (ErrorKind::OutOfOrder, 4, [SessionLost, SessionLost, SessionLost]),
            (ErrorKind::OutOfOrder, 5, [Again, Again, Again]),
        ];
        for (kind, expected_seq, verdict) in cases {
            assert_eq!(verdicts(kind, expected_seq), verdict, "{kind:?}, expected {expected_seq}");
        }
    }
}
