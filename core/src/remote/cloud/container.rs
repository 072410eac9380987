//! Credentials from a service of the container, as of EKS Pod Identity.
//!
//! The library asks that service too, but panics if the file with its token ends in a line break.

use std::collections::BTreeMap;
use std::path::Path;

use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody, ReqwestConnector};
use serde::Deserialize;

use super::clients::{REQUEST_TIMEOUT, options, variable};
use super::credentials::{CredentialParts, CredentialSource};
use super::runtime;
use super::sendable::{Sent, flaw};
use crate::io::settings_file;

const TOKEN_FILE: &str = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE";
const URI: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
/// Variables that count before those of a container.
const BEFORE: [&str; 3] =
    ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"];
/// The tries of a request.
const TRIES: u32 = 3;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct ContainerSource {
    uri: String,
    token_file: String,
}

/// The answer of the service. Its credentials are asked for again before they can expire.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ContainerKeys {
    access_key_id: String,
    secret_access_key: String,
    token: String,
}

impl ContainerSource {
    /// The source that the variables name. `None` if they name none, or another one before it.
    pub(super) fn of_variables() -> Option<Self> {
        let is_web_identity =
            variable(&["AWS_WEB_IDENTITY_TOKEN_FILE"]).is_some() && variable(&["AWS_ROLE_ARN"]).is_some();
        if is_web_identity || variable(&BEFORE).is_some() {
            return None;
        }
        Some(Self { uri: variable(&[URI])?, token_file: variable(&[TOKEN_FILE])? })
    }

    fn request(&self, token: &str) -> Result<HttpRequest, String> {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.uri_mut() = self.uri.parse().map_err(|_| format!("{URI} is no URL"))?;
        let header = token.parse().map_err(|_| format!("the token of {TOKEN_FILE} cannot be sent"))?;
        request.headers_mut().insert("authorization", header);
        Ok(request)
    }

    async fn ask(&self, token: &str) -> Result<ContainerKeys, String> {
        let failed = |what: String| format!("the service of {URI} {what}");
        let client = ReqwestConnector::default().connect(&options(REQUEST_TIMEOUT).with_allow_http(true));
        let client = client.map_err(|error| error.to_string())?;
        let mut tries = 0;
        loop {
            tries += 1;
            let answer = match client.execute(self.request(token)?).await {
                Ok(answer) if answer.status().is_success() => answer,
                Ok(answer) if tries < TRIES && answer.status().is_server_error() => continue,
                Ok(answer) => return Err(failed(format!("has answered {}", answer.status()))),
                Err(_) if tries < TRIES => continue,
                Err(error) => return Err(failed(format!("does not answer: {error}"))),
            };
            let body = answer.into_body().bytes().await.map_err(|error| failed(error.to_string()))?;
            return serde_json::from_slice(&body).map_err(|_| {
                failed("has answered without AccessKeyId, SecretAccessKey and Token".to_owned())
            });
        }
    }
}

impl CredentialSource for ContainerSource {
    fn fetch(&self) -> Result<CredentialParts, String> {
        let token = settings_file::read(Path::new(&self.token_file))
            .map_err(|error| format!("the file of {TOKEN_FILE} cannot be read: {error}"))?;
        let token = token.trim_end_matches(['\r', '\n']);
        if let Some(flaw) = flaw(token, Sent::InHeader) {
            return Err(format!("the token in the file of {TOKEN_FILE} {flaw}. Write it without that"));
        }
        let runtime = runtime().map_err(|error| error.to_string())?;
        let ContainerKeys { access_key_id, secret_access_key, token } = runtime.block_on(self.ask(token))?;
        let parts =
            [("access_key_id", access_key_id), ("secret_access_key", secret_access_key), ("token", token)];
        let parts: BTreeMap<String, String> =
            parts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(CredentialParts { parts, valid_for: None })
    }
}
