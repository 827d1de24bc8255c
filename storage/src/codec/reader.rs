//! Reads numbers and byte strings from a slice, without ever reading past its end.
//!
//! Not here: what the values mean.

/// The bytes are not what the format says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end before the value does.
    #[error("{field} needs {needed} bytes, {left} are left")]
    Short {
        /// What was being read.
        field: &'static str,
        /// How many bytes it takes.
        needed: usize,
        /// How many there are.
        left: usize,
    },
    /// A field's value is not allowed.
    #[error("{field} has a value that is not allowed")]
    Invalid {
        /// Which.
        field: &'static str,
    },
    /// Bytes are left behind the last field.
    #[error("{left} bytes behind the last field")]
    Trailing {
        /// How many.
        left: usize,
    },
}

/// A position in a slice.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'bytes> {
    rest: &'bytes [u8],
}

impl<'bytes> Reader<'bytes> {
    /// Starts at the beginning.
    #[must_use]
    pub fn new(bytes: &'bytes [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The next `count` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn bytes(&mut self, field: &'static str, count: usize) -> Result<&'bytes [u8], DecodeError> {
        match self.rest.split_at_checked(count) {
            Some((head, rest)) => {
                self.rest = rest;
                Ok(head)
            }
            None => Err(DecodeError::Short { field, needed: count, left: self.rest.len() }),
        }
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(field, N)?);
        Ok(array)
    }

    /// One byte.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        Ok(self.array::<1>(field)?[0])
    }

    /// Four bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    /// Eight bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A byte string behind its length (u32).
    ///
    /// # Errors
    /// [`DecodeError::Short`].
    pub fn block(&mut self, field: &'static str) -> Result<&'bytes [u8], DecodeError> {
        let length = self.u32(field)?;
        self.bytes(field, usize::try_from(length).map_err(|_| DecodeError::Invalid { field })?)
    }

    /// What was not read yet.
    #[must_use]
    pub fn rest(&self) -> &'bytes [u8] {
        self.rest
    }

    /// The end must be here.
    ///
    /// # Errors
    /// [`DecodeError::Trailing`].
    pub fn finish(self) -> Result<(), DecodeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError::Trailing { left: self.rest.len() }) }
    }
}
