//! Tests of restores, one file per promise.

mod bounds;
mod changes;
mod computed;
mod damage;
mod devices;
mod engines;
mod objects;
mod saved;
mod scatter;
mod streams;
mod whole;
