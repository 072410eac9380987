//! Numbers that are the same for the same seed (SplitMix64), and what is drawn with them.

/// See the module documentation.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `0 .. n`; 0 where there is nothing.
    pub fn below(&mut self, n: u64) -> u64 {
        self.number() % n.max(1)
    }

    /// Both ends included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Once in so many times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }

    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// At least one of them, in their order.
    pub fn some<T: Clone>(&mut self, from: &[T]) -> Vec<T> {
        let sure = self.below(from.len() as u64) as usize;
        let taken = from.iter().enumerate().filter(|(at, _)| *at == sure || self.once_in(2));
        taken.map(|(_, one)| one.clone()).collect()
    }

    /// An order of so many dimensions, as often as not the natural one.
    pub fn order(&mut self, dimensions: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..dimensions).collect();
        if self.once_in(2) {
            self.shuffle(&mut order);
        }
        order
    }

    /// Borders of so many parts of `0 .. end`, at any places: parts may be empty.
    pub fn borders(&mut self, end: u64, parts: usize) -> Vec<u64> {
        let mut borders: Vec<u64> = (1..parts).map(|_| self.below(end + 1)).collect();
        borders.extend([0, end]);
        borders.sort_unstable();
        borders
    }
}
