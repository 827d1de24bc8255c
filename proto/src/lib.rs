//! Evershard's words on the wire and in the log: generated gRPC types, the push body, keys and limits.
//!
//! Both ends of every wire use this crate, so it holds layouts and maximums, and no behaviour. It knows nothing of
//! storage, of Raft or of optimizers.

pub mod digest;
pub mod encoding;
#[cfg(test)]
mod formats_test;
pub mod key;
pub mod limits;
pub mod push_body;
pub mod shard_command;
pub mod tensor;

/// Metadata of gRPC calls: the recovery epoch of whoever asks (see `Routing` in `admin.proto`).
pub const RECOVERY_METADATA: &str = "evershard-recovery";

/// Generated from `proto/evershard/v1/*.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("evershard.v1");
    /// The encoded file descriptors, for gRPC reflection.
    pub const FILE_DESCRIPTORS: &[u8] =
        include_bytes!(concat!(env!("OUT_DIR"), "/evershard_descriptors.bin"));
}

/// Counts what decoders take.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: evershard_formats::Counting = evershard_formats::Counting;
