//! Names in a replica's folder.
//!
//! ```text
//! meta            the meta record (rocks::meta_record); names the generation that counts
//! meta.tmp        one being written; a leftover after a crash
//! rocks-<n>       RocksDB of generation n, n in 16 hexadecimal digits; any but the one that counts is a leftover
//! runs/           sorted runs being written; leftovers after a crash
//! ```
//! A folder of links (a raft snapshot) has `meta` and `rocks`.

use std::fmt;

/// A name in a replica's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReplicaFile {
    /// The meta record.
    Meta,
    /// A meta record being written.
    MetaTemporary,
    /// RocksDB of a generation: every installed snapshot begins a new one.
    Rocks {
        /// Counts installs.
        generation: u64,
    },
    /// Sorted runs being written.
    Runs,
    /// RocksDB in a folder of links.
    LinkedRocks,
}

impl fmt::Display for ReplicaFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Meta => formatter.write_str("meta"),
            Self::MetaTemporary => formatter.write_str("meta.tmp"),
            Self::Rocks { generation } => write!(formatter, "rocks-{generation:016x}"),
            Self::Runs => formatter.write_str("runs"),
            Self::LinkedRocks => formatter.write_str("rocks"),
        }
    }
}

impl ReplicaFile {
    /// Reads a name; `None` when it is not one of ours.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let file = match name {
            "meta" => Self::Meta,
            "meta.tmp" => Self::MetaTemporary,
            "runs" => Self::Runs,
            "rocks" => Self::LinkedRocks,
            _ => Self::Rocks { generation: u64::from_str_radix(name.strip_prefix("rocks-")?, 16).ok()? },
        };
        // Only the spelling that is written: no upper case, no missing zeros, no sign.
        (file.to_string() == name).then_some(file)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn names_round_trip(generation: u64) {
            use ReplicaFile::{LinkedRocks, Meta, MetaTemporary, Rocks, Runs};
            for file in [Meta, MetaTemporary, Runs, LinkedRocks, Rocks { generation }] {
                prop_assert_eq!(ReplicaFile::parse(&file.to_string()), Some(file));
            }
        }

        #[test]
        fn a_name_that_is_read_is_written_the_same(name in "(rocks-)?[0-9a-fA-F+]{0,17}|meta.*") {
            if let Some(file) = ReplicaFile::parse(&name) {
                prop_assert_eq!(file.to_string(), name);
            }
        }
    }
}
