//! The clients of a bucket: S3, Google Cloud Storage or Azure Blob Storage.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, Checksum, resolve_bucket_region};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder};
use object_store::multipart::MultipartStore;
use object_store::{Certificate, ClientOptions, ObjectStore, RetryConfig, StaticCredentialProvider};
use serde::Deserialize;

use super::container::ContainerSource;
use super::credentials::{CredentialSource, Forget, Renewed};
use super::sendable::{self, Sent};
use super::transport::CheckedConnector;
use super::{RETRY_TIMEOUT, without_secrets};
use crate::io::settings_file;
use crate::{Error, Result};

/// The deadline of a request with few bytes.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The repetitions of a request for data. The time ends them before (`RETRY_TIMEOUT`).
const DATA_RETRIES: usize = 1000;
/// A file of certificates that AWS's clients trust.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";
/// No repetition of a request with few bytes begins later than this after the first one.
const SMALL_RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// How a store is reached. Variables of the environment give what is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSettings {
    /// The URL of the server, if it is not the cloud's own.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// The region of an S3 bucket.
    #[serde(default)]
    pub region: Option<String>,
    /// Sends no credentials.
    #[serde(default)]
    pub anonymous: bool,
    /// Names the bucket in the host and not in the path (S3).
    #[serde(default)]
    pub virtual_hosted: bool,
    /// Sends a CRC64NVME of each part, which the server checks (S3).
    #[serde(default)]
    pub checksum: bool,
}

/// A client for data.
pub(super) trait Cloud: ObjectStore + MultipartStore {}

impl<T: ObjectStore + MultipartStore> Cloud for T {}

/// The clients of a bucket.
pub(super) struct Clients {
    /// Repeats requests by itself.
    pub data: Arc<dyn Cloud>,
    /// The same for requests with few bytes, which end sooner.
    pub small: Arc<dyn Cloud>,
    /// Creates entries of the ledger, and repeats nothing.
    pub entries: Arc<dyn Cloud>,
    /// The credentials of the program, if it gives them.
    pub credentials: Option<Arc<dyn Forget>>,
}

impl Clients {
    /// Makes the clients of the bucket at `scheme://name`.
    pub fn new(
        url: &str,
        settings: &StoreSettings,
        source: Option<&Arc<dyn CredentialSource>>,
    ) -> Result<Self> {
        let Some((scheme, name)) = url.split_once("://").filter(|(_, name)| is_bucket(name)) else {
            return Err(Error::Misuse(format!("{url} is not the URL of a bucket, as s3://bucket is")));
        };
        sendable::check_bucket(url, name)?;
        if let Some(region) = &settings.region {
            sendable::check(url, "the region", region, Sent::InHost)?;
        }
        let is_given = settings.anonymous || source.is_some();
        let (credentials, variables) = match scheme {
            "s3" => (&sendable::AWS_CREDENTIALS[..], &sendable::AWS_SETTINGS[..]),
            "gs" => (&sendable::GOOGLE_CREDENTIALS[..], &[][..]),
            _ => (&sendable::AZURE_CREDENTIALS[..], &sendable::AZURE_SETTINGS[..]),
        };
        sendable::check_variables(url, if is_given { &[] } else { credentials })?;
        sendable::check_variables(url, variables)?;
        // Fails if a provider is installed already, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        match scheme {
            "s3" => s3(url, name, settings, source),
            "gs" => google(url, name, settings, source),
            "az" | "abfs" | "abfss" => azure(url, settings, source),
            _ => Err(Error::Misuse(format!("{url}: no store has the scheme {scheme}://"))),
        }
    }

    /// Makes all clients by `build`. They trust these certificates beside those of the system.
    fn all<T: Cloud>(
        url: &str,
        endpoint: Option<&str>,
        trusted: &[Certificate],
        credentials: Option<Arc<dyn Forget>>,
        build: impl Fn(ClientOptions, RetryConfig) -> object_store::Result<T>,
    ) -> Result<Self> {
        let is_http = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        if let Some(endpoint) = endpoint {
            // The clients take an empty one.
            let shown = if endpoint.is_empty() { "no host" } else { endpoint };
            sendable::check(url, "the endpoint of the store", shown, Sent::AsUrl)?;
        }
        if is_http {
            tracing::warn!(url, "the endpoint of this store is not encrypted (http://)");
        }
        let client = |timeout, max_retries, retry_timeout| -> Result<Arc<dyn Cloud>> {
            let retry = RetryConfig { max_retries, retry_timeout, ..RetryConfig::default() };
            let built = build(trusting(options(timeout), trusted).with_allow_http(is_http), retry);
            built.map(|client| Arc::new(client) as _).map_err(|error| refused(url, &error))
        };
        Ok(Self {
            data: client(REQUEST_TIMEOUT * 8, DATA_RETRIES, RETRY_TIMEOUT)?,
            small: client(REQUEST_TIMEOUT, DATA_RETRIES, SMALL_RETRY_TIMEOUT)?,
            entries: client(REQUEST_TIMEOUT, 0, Duration::ZERO)?,
            credentials,
        })
    }
}

fn is_bucket(name: &str) -> bool {
    !name.is_empty() && !name.contains('/')
}

pub(super) fn options(timeout: Duration) -> ClientOptions {
    ClientOptions::new().with_timeout(timeout).with_connect_timeout(REQUEST_TIMEOUT / 3)
}

/// Adds certificates that a client trusts.
fn trusting(options: ClientOptions, trusted: &[Certificate]) -> ClientOptions {
    trusted.iter().fold(options, |options, one| options.with_root_certificate(one.clone()))
}

/// Returns the certificates in the file that AWS's variable names.
fn certificates(url: &str) -> Result<Vec<Certificate>> {
    let Some(file) = variable(&[CA_BUNDLE]).filter(|file| !file.is_empty()) else { return Ok(Vec::new()) };
    let refuse = |what: String| Err(Error::Misuse(format!("{url}: the file {file} of {CA_BUNDLE} {what}")));
    let text = match settings_file::read(Path::new(&file)) {
        Ok(text) => text,
        Err(error) => return refuse(format!("cannot be read: {error}. Name a file of certificates")),
    };
    match Certificate::from_pem_bundle(text.as_bytes()) {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) | Err(_) => refuse("has no certificates. Name a file of them, as PEM".to_owned()),
    }
}

fn refused(url: &str, error: &object_store::Error) -> Error {
    Error::Misuse(format!("{url}: {}", without_secrets(error)))
}

/// The first of some variables that is set. One with an endpoint must not be empty: the clients
/// would take it.
pub(super) fn variable(names: &[&str]) -> Option<String> {
    names.iter().find_map(|name| std::env::var(name).ok())
}

fn s3(
    url: &str,
    bucket: &str,
    settings: &StoreSettings,
    source: Option<&Arc<dyn CredentialSource>>,
) -> Result<Clients> {
    let endpoint = settings
        .endpoint
        .clone()
        .or_else(|| variable(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]));
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_unsigned_payload(true)
        .with_http_connector(CheckedConnector::new("ListBucketResult"))
        .with_skip_signature(settings.anonymous)
        .with_virtual_hosted_style_request(settings.virtual_hosted);
    if let Some(endpoint) = &endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    let trusted = certificates(url)?;
    let region = settings.region.clone().or_else(|| variable(&["AWS_REGION", "AWS_DEFAULT_REGION"]));
    let region = region.filter(|region| !region.is_empty());
    let region = match (region, &endpoint) {
        (Some(region), _) => Some(region),
        // Another server than AWS rarely has regions.
        (None, Some(_)) => None,
        (None, None) => Some(region_of(url, bucket, &trusted)?),
    };
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    if settings.checksum {
        builder = builder.with_checksum_algorithm(Checksum::CRC64NVME);
    }
    let container = || Some(Arc::new(ContainerSource::of_variables()?) as Arc<dyn CredentialSource>);
    let own = if settings.anonymous { None } else { source.cloned().or_else(container) };
    let credentials = own.as_ref().map(Renewed::new);
    if let Some(credentials) = &credentials {
        builder = builder.with_credentials(Arc::clone(credentials) as _);
    }
    Clients::all(url, endpoint.as_deref(), &trusted, credentials.map(|one| one as _), |options, retry| {
        builder.clone().with_client_options(options).with_retry(retry).build()
    })
}

/// Asks AWS where a bucket is.
fn region_of(url: &str, bucket: &str, trusted: &[Certificate]) -> Result<String> {
    let options = trusting(options(REQUEST_TIMEOUT), trusted);
    let asked =
        async { tokio::time::timeout(REQUEST_TIMEOUT, resolve_bucket_region(bucket, &options)).await };
    let why = match super::runtime()?.block_on(asked) {
        Ok(Ok(region)) => return Ok(region),
        Ok(Err(error)) => without_secrets(&error),
        Err(_) => "AWS did not answer".to_owned(),
    };
    Err(Error::Misuse(format!(
        "{url}: the region of the bucket was not found ({why}). Set the variable AWS_REGION"
    )))
}

fn google(
    url: &str,
    bucket: &str,
    settings: &StoreSettings,
    source: Option<&Arc<dyn CredentialSource>>,
) -> Result<Clients> {
    let endpoint = settings.endpoint.clone().or_else(|| variable(&["STORAGE_EMULATOR_HOST"]));
    let endpoint = endpoint.map(|host| if host.contains("://") { host } else { format!("http://{host}") });
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_http_connector(CheckedConnector::new("ListBucketResult"))
        .with_skip_signature(settings.anonymous);
    if let Some(endpoint) = &endpoint {
        builder = builder.with_base_url(endpoint);
    }
    if settings.anonymous {
        // Writes of this client ask for a token although signatures are skipped.
        let none = GcpCredential { bearer: String::new() };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(none)));
    }
    let credentials = source.map(Renewed::new);
    if let Some(credentials) = &credentials {
        builder = builder.with_credentials(Arc::clone(credentials) as _);
    }
    Clients::all(url, endpoint.as_deref(), &[], credentials.map(|one| one as _), |options, retry| {
        builder.clone().with_client_options(options).with_retry(retry).build()
    })
}

fn azure(url: &str, settings: &StoreSettings, source: Option<&Arc<dyn CredentialSource>>) -> Result<Clients> {
    let endpoint = settings.endpoint.clone().or_else(|| variable(&["AZURE_STORAGE_ENDPOINT"]));
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_url(url)
        .with_http_connector(CheckedConnector::new("EnumerationResults"))
        .with_skip_signature(settings.anonymous);
    if let Some(endpoint) = &endpoint {
        builder = builder.with_endpoint(endpoint.clone());
    }
    let credentials = source.map(Renewed::new);
    if let Some(credentials) = &credentials {
        builder = builder.with_credentials(Arc::clone(credentials) as _);
    }
    Clients::all(url, endpoint.as_deref(), &[], credentials.map(|one| one as _), |options, retry| {
        builder.clone().with_client_options(options).with_retry(retry).build()
    })
}
