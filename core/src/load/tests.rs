//! What a restore promises, one file per promise.

mod bounds;
mod damage;
mod scatter;
mod whole;
