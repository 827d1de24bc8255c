//! The name of a checkpoint, which is also the name of a file: it cannot lead anywhere else.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Characters of a name.
pub const NAME_CHARACTERS_MAX: usize = 63;

/// A checkpoint's name: `[a-z0-9][a-z0-9._-]{0,62}`.
///
/// Invariant: it is one component of a path, not hidden, and the same on file systems that do not tell cases apart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName(String);

/// The text names no checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{found:?} is not a checkpoint's name: up to {NAME_CHARACTERS_MAX} of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit"
)]
pub struct BadName {
    /// What it says, or how it begins.
    pub found: String,
}

impl CheckpointName {
    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for CheckpointName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let is_first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let is_good = |byte: u8| is_first(byte) || matches!(byte, b'.' | b'_' | b'-');
        let bytes = text.as_bytes();
        if bytes.len() <= NAME_CHARACTERS_MAX
            && bytes.first().copied().is_some_and(is_first)
            && bytes.iter().copied().all(is_good)
        {
            return Ok(CheckpointName(text.to_owned()));
        }
        Err(BadName { found: text.chars().take(NAME_CHARACTERS_MAX + 1).collect() })
    }
}

impl Serialize for CheckpointName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for CheckpointName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_nowhere_else() {
        let longest = "a".repeat(63);
        for good in ["a", "day-1", "2026-12-04.base_2", "0..x", &longest] {
            assert_eq!(good.parse::<CheckpointName>().expect("a name").as_str(), good);
        }
        let too_long = "a".repeat(64);
        for bad in [
            "", ".", "..", ".hidden", "-x", "_x", "A", "a/b", "a\\b", "../a", "a b", "a\0", "é", "a\n",
            &too_long,
        ] {
            assert!(bad.parse::<CheckpointName>().is_err(), "{bad:?}");
        }
    }
}
