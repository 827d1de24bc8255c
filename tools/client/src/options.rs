//! What a user may set.

use std::time::Duration;

use evershard_proto::limits::PUSHES_IN_FLIGHT_MAX;

use crate::Error;

/// Settings of a [`crate::Client`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientOptions {
    /// An operation that is not done by then fails. Through a failover it just takes longer.
    pub deadline: Duration,
    /// How long a node may take to accept a connection.
    pub connect_timeout: Duration,
    /// A request that is not answered by then is sent again (safely: under its old number).
    pub attempt_timeout: Duration,
    /// Push messages sent and not yet acknowledged, per shard.
    pub pushes_in_flight: usize,
    /// Bytes of push messages not yet acknowledged, over all shards. Those whose deadline is over count no more.
    pub push_bytes_in_flight: usize,
    /// Memory for what int8 gradients left out and the id's next ones make up for. The ids pushed longest ago are forgotten.
    pub residual_bytes: usize,
    /// Pull requests sent and not yet answered, per operation: each answer has at most 1 MiB.
    pub pulls_in_flight: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        ClientOptions {
            deadline: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(1),
            attempt_timeout: Duration::from_secs(3),
            pushes_in_flight: 32,
            push_bytes_in_flight: 64 << 20,
            residual_bytes: 256 << 20,
            pulls_in_flight: 32,
        }
    }
}

impl ClientOptions {
    /// Checks every field.
    ///
    /// # Errors
    /// [`Error::Refused`] naming the field.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let checks = [
            (!self.deadline.is_zero(), "deadline must not be zero"),
            (!self.connect_timeout.is_zero(), "connect_timeout must not be zero"),
            (!self.attempt_timeout.is_zero(), "attempt_timeout must not be zero"),
            (
                (1..=PUSHES_IN_FLIGHT_MAX).contains(&self.pushes_in_flight),
                "pushes_in_flight must be from 1 to 64",
            ),
            (
                (4 << 20..=u32::MAX as usize).contains(&self.push_bytes_in_flight),
                "push_bytes_in_flight must be from 4 MiB to 4 GiB",
            ),
            (self.pulls_in_flight > 0, "pulls_in_flight must not be zero"),
        ];
        match checks.iter().find(|(ok, _)| !ok) {
            Some((_, problem)) => Err(Error::invalid(*problem)),
            None => Ok(()),
        }
    }
}
