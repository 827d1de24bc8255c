//! What a file of a checkpoint is named by: the first 16 bytes of BLAKE3 of its bytes, and beside them a crc32.
//!
//! Invariant: a hash has one spelling, 32 lower-case hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

const BYTES: usize = 16;

/// The hash of a file's bytes, which is its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileHash([u8; BYTES]);

/// The text is no hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a hash: 32 lower-case hexadecimal digits")]
pub struct NoHash {
    /// What it says, or how it begins.
    pub found: String,
}

/// What a file turned out to be once all of it went by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// Its length.
    pub bytes: u64,
    /// Of all bytes.
    pub crc32: u32,
    /// Of all bytes.
    pub hash: FileHash,
}

/// Takes a file piece by piece.
#[derive(Debug, Clone, Default)]
pub struct FileHasher {
    blake3: blake3::Hasher,
    crc32: crc32fast::Hasher,
    bytes: u64,
}

impl FileHash {
    /// Of bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self::of_digest(&blake3::hash(bytes))
    }

    fn of_digest(digest: &blake3::Hash) -> Self {
        let mut hash = [0; BYTES];
        hash.copy_from_slice(&digest.as_bytes()[..BYTES]);
        FileHash(hash)
    }
}

impl FileHasher {
    /// The next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.blake3.update(bytes);
        self.crc32.update(bytes);
        self.bytes += bytes.len() as u64;
    }

    /// Bytes that went by.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// After the last of them.
    #[must_use]
    pub fn finish(self) -> Fingerprint {
        let hash = FileHash::of_digest(&self.blake3.finalize());
        Fingerprint { bytes: self.bytes, crc32: self.crc32.finalize(), hash }
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHash({self})")
    }
}

fn digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    }
}

impl FromStr for FileHash {
    type Err = NoHash;

    fn from_str(text: &str) -> Result<Self, NoHash> {
        let parse = || {
            let mut hash = [0; BYTES];
            let digits = text.as_bytes();
            if digits.len() != 2 * BYTES {
                return None;
            }
            for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
                *byte = digit(pair[0])? << 4 | digit(pair[1])?;
            }
            Some(FileHash(hash))
        };
        parse().ok_or_else(|| NoHash { found: text.chars().take(40).collect() })
    }
}

impl Serialize for FileHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FileHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_make_the_hash_of_the_whole() {
        let bytes: Vec<u8> = (0..5000_u32).map(|i| i as u8).collect();
        let mut hasher = FileHasher::default();
        bytes.chunks(77).for_each(|piece| hasher.update(piece));
        let found = hasher.finish();
        assert_eq!((found.hash, found.bytes), (FileHash::of(&bytes), 5000));
        assert_eq!(found.crc32, crc32fast::hash(&bytes));
        // Of a published implementation: the hash of no bytes begins like this.
        assert_eq!(FileHash::of(b"").to_string(), "af1349b9f5f9a1a6a0404dea36dcc949");
    }

    #[test]
    fn a_hash_has_one_spelling() {
        let hash = FileHash::of(b"rows");
        assert_eq!(hash.to_string().parse(), Ok(hash));
        let text = hash.to_string();
        for bad in [text.to_uppercase(), text[1..].into(), format!("{text}0"), "../x".into(), String::new()] {
            assert_eq!(bad.parse::<FileHash>(), Err(NoHash { found: bad.clone() }));
        }
    }
}
