//! A table's say in which rows there are: which ids a gradient makes a row for, and which rows go by themselves.
//!
//! Both are decided by what every replica has: admission by the id and the record of the row, in apply; eviction by the leader,
//! from its records, and applied by their versions. What the rules need to know of a row is in its notes, which only tables
//! with such rules have:
//!
//! ```text
//! frequency u32 (max_rows) | seconds u32 (expire_seconds) | clock u64, the low half first (steps_to_live)
//! ```
//!
//! Not here: counting (`apply::row_update`), looking for rows that are to go (`eviction`).

use evershard_proto::key::mix64;
use evershard_proto::push_body::counts_occurrences;
use evershard_proto::v1;

use super::SchemaError;

/// Seeds of other hashes must not make the same choices.
const ADMISSION_DOMAIN: u64 = 0xad31_7c5e_0b6f_52d9;
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A table's rules, checked. Without any by default.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RowRules {
    /// A row is made by its id's n-th occurrence; 0 and 1: by the first.
    filter_freq: u32,
    admit_probability: Option<f64>,
    seed: u64,
    counts: bool,
    /// Seconds of the replicated clock since a row changed; 0: for ever.
    pub expire_seconds: u64,
    /// Growth of the table's step since a row changed; 0: for ever.
    pub steps_to_live: u64,
    /// What the norm of a row's weights must not be below; 0: anything.
    pub min_l2: f32,
    /// Rows over all shards; 0: as many as there are.
    pub max_rows: u64,
}

/// What happens to a row that is noted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowUse {
    /// How often its id came, at this moment.
    pub occurrences: u32,
    /// The replicated clock, in seconds.
    pub seconds: u32,
    /// The clock of the push.
    pub clock: u64,
}

/// What a row's notes say. Fields that its table does not note are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowNotes {
    /// How often its id came.
    pub frequency: u32,
    /// The replicated clock when it changed last, in seconds.
    pub seconds: u32,
    /// The highest clock of the pushes that changed it.
    pub clock: u64,
}

impl RowRules {
    /// Checks a definition's rules.
    ///
    /// # Errors
    /// [`SchemaError`], naming the field.
    pub fn new(definition: &v1::TableDefinition) -> Result<Self, SchemaError> {
        let admission = definition.admission.unwrap_or_default();
        let eviction = definition.eviction.unwrap_or_default();
        let refused = |field, value, must| {
            Err(SchemaError::Value { table: definition.name.clone(), field, value, must })
        };
        let probability = admission.admit_probability;
        if !(0.0..=1.0).contains(&probability) {
            let must = "above 0 and at most 1, or 0 for every id";
            return refused("admission.admit_probability", probability as f32, must);
        }
        if !(eviction.min_l2.is_finite() && eviction.min_l2 >= 0.0) {
            return refused("eviction.min_l2", eviction.min_l2, "finite and at least 0");
        }
        Ok(RowRules {
            filter_freq: admission.filter_freq,
            admit_probability: (probability > 0.0 && probability < 1.0).then_some(probability),
            seed: admission.seed,
            counts: counts_occurrences(definition),
            expire_seconds: eviction.expire_seconds,
            steps_to_live: eviction.steps_to_live,
            min_l2: eviction.min_l2,
            max_rows: eviction.max_rows,
        })
    }

    /// True when a gradient for any id makes a row.
    #[must_use]
    pub fn admits_all(&self) -> bool {
        self.filter_freq <= 1 && self.admit_probability.is_none()
    }

    /// Whether the hash of an id admits it, whatever its frequency. A pure function of seed and id.
    #[must_use]
    pub fn admits_id(&self, id: u64) -> bool {
        let Some(probability) = self.admit_probability else { return true };
        let hash = mix64(mix64(self.seed ^ ADMISSION_DOMAIN) ^ id.wrapping_mul(GOLDEN_GAMMA));
        // Below 2^64 as the probability is below 1; `as` cuts the fraction off.
        hash < (probability * 18_446_744_073_709_551_616.0) as u64
    }

    /// Whether an id that came so often gets a row.
    #[must_use]
    pub fn admits_frequency(&self, occurrences: u32) -> bool {
        occurrences >= self.filter_freq
    }

    /// Whether it matters how often an id comes in a push.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.counts
    }

    /// Whether rows go by themselves.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.expire_seconds > 0 || self.steps_to_live > 0 || self.min_l2 > 0.0 || self.max_rows > 0
    }

    /// Words that each row has for notes.
    #[must_use]
    pub fn notes(&self) -> u32 {
        u32::from(self.max_rows > 0)
            + u32::from(self.expire_seconds > 0)
            + 2 * u32::from(self.steps_to_live > 0)
    }

    /// Reads a row's notes.
    #[must_use]
    pub fn read(&self, notes: &[f32]) -> RowNotes {
        let mut words = notes.iter().map(|word| word.to_bits());
        let mut word = |is_noted: bool| if is_noted { words.next().unwrap_or(0) } else { 0 };
        let frequency = word(self.max_rows > 0);
        let seconds = word(self.expire_seconds > 0);
        let has_clock = self.steps_to_live > 0;
        let clock = u64::from(word(has_clock)) | u64::from(word(has_clock)) << 32;
        RowNotes { frequency, seconds, clock }
    }

    /// Notes what happened to a row. Of a row that is new all words are 0 before.
    pub fn note(&self, notes: &mut [f32], happened: RowUse) {
        let before = self.read(notes);
        let clock = before.clock.max(happened.clock);
        let after = [
            (self.max_rows > 0, before.frequency.saturating_add(happened.occurrences)),
            (self.expire_seconds > 0, happened.seconds),
            (self.steps_to_live > 0, clock as u32),
            (self.steps_to_live > 0, (clock >> 32) as u32),
        ];
        let words = after.into_iter().filter_map(|(is_noted, word)| is_noted.then_some(word));
        notes.iter_mut().zip(words).for_each(|(note, word)| *note = f32::from_bits(word));
    }
}

/// The cluster version that a table's definition needs.
#[must_use]
pub fn needed_cluster_version(definition: &v1::TableDefinition) -> u32 {
    let has_rules = definition.admission.is_some() || definition.eviction.is_some();
    if has_rules || definition.tensor.is_some() { super::CLUSTER_VERSION_ROW_RULES } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(admission: v1::Admission, eviction: v1::Eviction) -> Result<RowRules, SchemaError> {
        let (admission, eviction) = (Some(admission), Some(eviction));
        RowRules::new(&v1::TableDefinition { name: "t".into(), admission, eviction, ..Default::default() })
    }

    fn sampled(admit_probability: f64, seed: u64) -> RowRules {
        let admission = v1::Admission { admit_probability, seed, ..Default::default() };
        rules(admission, v1::Eviction::default()).expect("valid")
    }

    #[test]
    fn a_refusal_names_the_field() {
        for probability in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let admission = v1::Admission { admit_probability: probability, ..Default::default() };
            let refused = rules(admission, v1::Eviction::default()).expect_err("refused");
            assert!(refused.to_string().contains("admission.admit_probability"), "{refused}");
        }
        for min_l2 in [-1.0, f32::NAN, f32::INFINITY] {
            let eviction = v1::Eviction { min_l2, ..Default::default() };
            let refused = rules(v1::Admission::default(), eviction).expect_err("refused");
            assert!(refused.to_string().contains("eviction.min_l2"), "{refused}");
        }
    }

    #[test]
    fn the_share_that_is_admitted_is_the_probability() {
        for probability in [0.1, 0.5, 0.9] {
            let admitted = (0..100_000).filter(|id| sampled(probability, 7).admits_id(*id)).count();
            let share = admitted as f64 / 100_000.0;
            assert!((share - probability).abs() < 0.01, "{share} of {probability}");
        }
        assert!((0..1000).all(|id| sampled(1.0, 7).admits_id(id) && sampled(0.0, 7).admits_id(id)));
        let chosen = |seed| (0..64).filter(|id| sampled(0.5, seed).admits_id(*id)).collect::<Vec<u64>>();
        assert_ne!(chosen(1), chosen(2));
        // Replicas of every build must choose alike.
        assert_eq!(&chosen(1)[..6], GOLDEN_CHOICE);
    }

    const GOLDEN_CHOICE: &[u64] = &[0, 2, 3, 4, 5, 6];

    #[test]
    fn notes_hold_what_their_rules_need_and_nothing_else() {
        let happened = RowUse { occurrences: 3, seconds: 0x7fc0_0001, clock: 0x7f80_0001_ff80_0002 };
        for number in 0..8u64 {
            let eviction = v1::Eviction {
                max_rows: number & 1,
                expire_seconds: number >> 1 & 1,
                steps_to_live: number >> 2,
                ..Default::default()
            };
            let rules = rules(v1::Admission::default(), eviction).expect("valid");
            let mut notes = vec![0.0; rules.notes() as usize];
            rules.note(&mut notes, happened);
            rules.note(&mut notes, RowUse { occurrences: 1, clock: 5, ..happened });
            let expected = RowNotes {
                frequency: if number & 1 == 1 { 4 } else { 0 },
                seconds: if number >> 1 & 1 == 1 { happened.seconds } else { 0 },
                clock: if number >> 2 == 1 { happened.clock } else { 0 },
            };
            assert_eq!(rules.read(&notes), expected, "words are kept bit by bit");
            assert_eq!(
                notes.len(),
                (number & 1) as usize + (number >> 1 & 1) as usize + 2 * (number >> 2) as usize
            );
        }
        assert_eq!(RowRules::default().notes(), 0);
    }
}
