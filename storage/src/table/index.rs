//! From key to slot. (First version.)
use std::collections::HashMap;

use super::slot::Slot;

#[derive(Debug, Default)]
pub(super) struct Index {
    map: HashMap<u64, Slot>,
}

impl Index {
    pub(super) fn find(&self, key: u64) -> Option<Slot> {
        self.map.get(&key).copied()
    }
    pub(super) fn insert(&mut self, key: u64, slot: Slot) {
        self.map.insert(key, slot);
    }
    pub(super) fn remove(&mut self, key: u64) -> Option<Slot> {
        self.map.remove(&key)
    }
    pub(super) fn bytes(&self) -> usize {
        self.map.capacity() * 13
    }
}
