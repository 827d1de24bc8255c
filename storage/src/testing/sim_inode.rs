//! A simulated file's bytes: those that are durable, and those that a power cut may take.
//!
//! Invariants:
//! - `live` is what the process reads; `durable` plus all of `pending` equals `live`.
//! - A power cut keeps `durable` and an arbitrary part of `pending`: whole operations, or single sectors of a write.
//!
//! Not here: names and directories (`sim_disk`).

/// Sectors of a write are kept or lost one by one.
const SECTOR: usize = 512;

/// A change since the last sync.
#[derive(Debug, Clone)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    SetLength(usize),
}

/// One file's bytes.
#[derive(Debug, Clone, Default)]
pub(super) struct SimInode {
    live: Vec<u8>,
    durable: Vec<u8>,
    pending: Vec<Change>,
}

impl SimInode {
    pub(super) fn live(&self) -> &[u8] {
        &self.live
    }

    pub(super) fn write(&mut self, offset: usize, bytes: Vec<u8>) {
        self.change(Change::Write { offset, bytes });
    }

    pub(super) fn set_length(&mut self, length: usize) {
        self.change(Change::SetLength(length));
    }

    fn change(&mut self, change: Change) {
        apply(&mut self.live, &change);
        self.pending.push(change);
    }

    pub(super) fn sync(&mut self) {
        self.durable.clone_from(&self.live);
        self.pending.clear();
    }

    /// Edits the bytes at rest, as a bad disk or a bad hand would.
    pub(super) fn edit(&mut self, edit: impl FnOnce(&mut Vec<u8>)) {
        edit(&mut self.live);
        self.durable.clone_from(&self.live);
        self.pending.clear();
    }

    /// The power was cut: nothing of `pending` is kept.
    pub(super) fn lose_all(&mut self) {
        self.live.clone_from(&self.durable);
        self.pending.clear();
    }

    /// The power was cut: of each pending change the disk kept all, nothing, or some sectors and a torn one.
    pub(super) fn lose_some(&mut self, mut random: impl FnMut() -> u64) {
        let mut bytes = std::mem::take(&mut self.durable);
        for change in std::mem::take(&mut self.pending) {
            match random() % 4 {
                0 => {}
                1 => apply(&mut bytes, &change),
                _ => apply_torn(&mut bytes, &change, &mut random),
            }
        }
        self.live.clone_from(&bytes);
        self.durable = bytes;
    }
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Write { offset, bytes: written } => {
            let end = offset + written.len();
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[*offset..end].copy_from_slice(written);
        }
        Change::SetLength(length) => bytes.resize(*length, 0),
    }
}

fn apply_torn(bytes: &mut Vec<u8>, change: &Change, random: &mut impl FnMut() -> u64) {
    let Change::Write { offset, bytes: written } = change else {
        return apply(bytes, change);
    };
    let mut start = 0;
    while start < written.len() {
        // Up to the next sector border of the file.
        let end = written.len().min(start + SECTOR - (offset + start) % SECTOR);
        let kept = match random() % 8 {
            0..=3 => end,
            4 => start + (random() % (end - start) as u64) as usize,
            _ => start,
        };
        if kept > start {
            apply(bytes, &Change::Write { offset: offset + start, bytes: written[start..kept].to_vec() });
        }
        start = end;
    }
}
