//! What int8 left out, kept at the worker and added to the id's next gradient (error feedback).
//!
//! Invariants:
//! - memory is bounded by [`ClientOptions::residual_bytes`](crate::ClientOptions): two generations share it, and when the
//!   younger has used half of it, the older is forgotten. An id that is pushed often stays; one that is forgotten loses less
//!   than one step of its row's scale a value, once;
//! - residuals change only when a whole push is packed: one that is refused at the client leaves them as they were;
//! - they live as long as the client. They are not sent, logged or checkpointed; assigning or removing an id forgets its own.
//!
//! A message keeps the bytes it was packed with: a retry sends those, and touches no residual. A push that the servers refuse,
//! or whose outcome is unknown, keeps the residual of its encoding: that is below one step of the scale, too.

use std::collections::HashMap;

/// Bytes an entry takes over its values: key, vector, bucket.
const ENTRY_BYTES: usize = 64;

type Generation = HashMap<(u32, u64), Box<[f32]>>;

/// The residuals of one client, by table and id.
#[derive(Debug)]
pub(crate) struct Residuals {
    young: Generation,
    old: Generation,
    young_bytes: usize,
    bytes_max: usize,
}

impl Residuals {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Residuals { young: HashMap::new(), old: HashMap::new(), young_bytes: 0, bytes_max }
    }

    /// What an id's last gradient left out, if that is known.
    pub(super) fn get(&self, table: u32, id: u64) -> Option<&[f32]> {
        self.young.get(&(table, id)).or_else(|| self.old.get(&(table, id))).map(|values| &**values)
    }

    pub(super) fn put(&mut self, table: u32, id: u64, values: Box<[f32]>) {
        let bytes = ENTRY_BYTES + size_of_val(&*values);
        if bytes > self.bytes_max / 2 {
            return;
        }
        if self.young_bytes + bytes > self.bytes_max / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if self.young.insert((table, id), values).is_none() {
            self.young_bytes += bytes;
        }
    }

    pub(super) fn forget(&mut self, table: u32, id: u64) {
        if let Some(values) = self.young.remove(&(table, id)) {
            self.young_bytes -= ENTRY_BYTES + size_of_val(&*values);
        }
        self.old.remove(&(table, id));
    }

    /// All of a table's.
    pub(super) fn forget_table(&mut self, table: u32) {
        self.old.retain(|(of, _), _| *of != table);
        let young_bytes = &mut self.young_bytes;
        self.young.retain(|(of, _), values| {
            let stays = *of != table;
            if !stays {
                *young_bytes -= ENTRY_BYTES + size_of_val(&**values);
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let mut residuals = Residuals::new(100 * (ENTRY_BYTES + 8));
        for id in 0..10_000 {
            residuals.put(1, id, Box::new([id as f32, 0.0]));
            residuals.put(1, 0, Box::new([id as f32, 1.0]));
            assert!(residuals.young.len() + residuals.old.len() <= 100);
            assert_eq!(residuals.get(1, 0), Some(&[id as f32, 1.0][..]));
        }
        assert_eq!(residuals.get(1, 5), None);
        assert_eq!(residuals.get(2, 0), None);
        residuals.put(2, 9, Box::new([1.0, 1.0]));
        residuals.forget_table(2);
        assert_eq!((residuals.get(2, 9), residuals.get(1, 0).is_some()), (None, true));
        residuals.forget(1, 0);
        assert_eq!(residuals.get(1, 0), None);
    }
}
